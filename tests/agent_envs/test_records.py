import gzip
import json

import pytest

from agent_envs import DataError
from agent_envs.core.records import read_records

ROWS = [{"a": 1}, {"a": "ü"}]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "json.gz"])
def test_every_kind_of_file_is_read(suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    text = json.dumps(ROWS) if suffix.startswith("json.") or suffix == "json" else lines
    data = text.encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert read_records(path) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b", "unknown kind of file"),
        ("rows.jsonl", b'{"a": 1}\n{"a": ', "row 2: is not valid JSON"),
        ("rows.jsonl", b"[1]\n", "row 1: must be an object, not list"),
        ("rows.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("rows.json", b"{}", "must hold a list of rows"),
        ("rows.jsonl.gz", b"plain", "cannot be read"),
        ("rows.jsonl.gz", gzip.compress(b"x" * 5000)[:-10], "ends too early"),
        ("rows.parquet", b"plain", "is not a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_records(path)
    assert str(path) in str(error.value)
