import json
import os
import stat

import pytest

from agent_envs.data.files import atomic_path, write_json, write_text


def mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.mark.parametrize(("umask", "expected"), [(0o022, "0o644"), (0o027, "0o640")])
def test_a_file_has_the_mode_that_the_umask_gives_new_files(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a.txt", "a")
        write_json(tmp_path / "b.json", {})
        with atomic_path(tmp_path / "c.bin") as path:  # as safetensors does it
            path.touch(mode=0o600)
    finally:
        os.umask(before)
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == {
        "a.txt": expected, "b.json": expected, "c.bin": expected,
    }  # fmt: skip


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.txt", "new \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_json_has_null_for_numbers_that_it_lacks(tmp_path):
    values = {"a": float("nan"), "b": [float("-inf"), 0.1], "c": "NaN"}
    write_json(tmp_path / "a.json", values)
    read = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert read == {"a": None, "b": [None, 0.1], "c": "NaN"}
