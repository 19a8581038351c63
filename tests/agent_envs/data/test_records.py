import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from agent_envs import DataError, Hub, MissingExtraError
from agent_envs.data.records import read_records
from agent_envs.data.sources import DatasetSpec, Source, hub_source

ROWS = [{"a": 1}, {"a": "ü"}]
EMPTY_GZIP = gzip.compress(b"", mtime=0)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "json.gz"])
def test_every_kind_of_file_is_read(suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    text = json.dumps(ROWS) if suffix.startswith("json.") or suffix == "json" else lines
    data = text.encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert read_records(path) == ROWS


def test_a_parquet_file_is_read_with_its_missing_values(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, None], "b": ["ü", "x"]}), path)
    assert read_records(path) == [{"a": 1, "b": "ü"}, {"a": None, "b": "x"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(name, tmp_path):
    text = '{"a": 1}\n' if name.endswith("jsonl") else '[{"a": 1}]'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_records(tmp_path / name) == [{"a": 1}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_folder_is_not_taken_for_an_empty_file(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        read_records(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b", "unknown kind of file"),
        ("rows.jsonl", b'{"a": 1}\n{"a": ', "row 2: is not valid JSON"),
        ("rows.jsonl", b"[1]\n", "row 1: must be an object, not list"),
        ("rows.jsonl", b"\xff\xfe", "cannot be read .UnicodeDecodeError"),
        ("rows.json", b"{}", "must hold a list of rows"),
        ("rows.jsonl.gz", b"plain", "cannot be read .BadGzipFile"),
        # a valid header, then a kind of block that does not exist
        ("rows.json.gz", EMPTY_GZIP[:10] + b"\xff" * 20, "cannot be read .error: Error -3"),
        ("rows.jsonl.gz", gzip.compress(b"x" * 5000, mtime=0)[:-10], "cannot be read .EOFError"),
        ("rows.parquet", b"plain", "is not a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_records(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: read_records(folder / "rows.parquet"),
        lambda folder: hub_source(Hub(name="X", path="x/y"), "test").rows(),
    ],
)
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, read):
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agent-r1\[data\]'.*'\.\[data\]'"):
        read(tmp_path)


def test_an_error_of_a_custom_reader_names_file_and_row():
    spec = DatasetSpec(read=lambda row, _: row["x"]["y"], form="A row has x.")
    rows = Source("mine.jsonl", 0, lambda: [{"x": {"y": 1}}, {"x": 3}])
    with pytest.raises(DataError, match=r"mine\.jsonl, row 2: TypeError.* A row has x\."):
        spec.read_all(rows)


@pytest.mark.parametrize("name", ["pipe.jsonl", "a\0b.jsonl"])
def test_a_pipe_or_a_name_with_nul_is_refused(tmp_path, name):
    if "pipe" in name:
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is no regular file"):
        read_records(tmp_path / name)
