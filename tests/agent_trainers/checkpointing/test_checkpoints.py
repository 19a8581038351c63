"""Folders of checkpoints: whole or not there, and checked."""

import os

import pytest

from agent_envs import ConfigurationError
from agent_trainers.checkpointing import checkpoints


@pytest.fixture
def write(tmp_path):
    """Write a checkpoint at a step, as a trainer does."""

    def write(step, content=b"weights"):
        finished = tmp_path / checkpoints.UNFINISHED / f"checkpoint-{step}"
        (finished / "global_step").mkdir(parents=True)
        (finished / "model.safetensors").write_bytes(content)
        (finished / "global_step" / "shard.pt").write_bytes(b"deep")
        checkpoints.publish_folder(finished, tmp_path / finished.name)
        return tmp_path / finished.name

    return write


def _flip(path):
    path.write_bytes(path.read_bytes()[:-2] + b"!")


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", _flip, "model.safetensors is damaged: its checksum differs"),
        ("global_step/shard.pt", os.unlink, "global_step/shard.pt is missing"),
        ("checkpoint.json", os.unlink, "checkpoint.json is missing"),
        ("checkpoint.json", lambda path: path.write_text("[]"), "checkpoint.json or a file in it"),
    ],
)
def test_the_newest_whole_checkpoint_is_found_past_damaged_ones(
    tmp_path, write, name, damage, reason
):
    (tmp_path / checkpoints.UNFINISHED / "checkpoint-11").mkdir(parents=True)
    good, bad = write(9), write(10)
    assert checkpoints.find_checkpoint(tmp_path) == (bad, [])
    damage(bad / name)
    found, (damaged,) = checkpoints.find_checkpoint(tmp_path)
    assert found == good
    assert f"{bad}: {reason}" in damaged
    write(10, content=b"again")  # replaces it
    assert checkpoints.find_checkpoint(tmp_path) == (bad, [])


def test_weights_arrive_last_and_other_files_in_the_folder_stay(tmp_path, monkeypatch):
    finished, target = tmp_path / "_unfinished" / "model", tmp_path
    finished.mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (finished / name).write_text(name)
    (target / "results.json").write_text("kept")
    moved, replace = [], type(target).replace
    monkeypatch.setattr(
        type(target), "replace", lambda path, to: (moved.append(to.name), replace(path, to))
    )
    checkpoints.publish_files(finished, target)
    assert moved == ["config.json", "tokenizer.json", "model.safetensors"]
    assert (target / "results.json").read_text() == "kept"


def test_an_output_folder_that_cannot_be_written_to_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match=r"--output_dir .*file/run.*Not a directory"):
        checkpoints.check_writable(file / "run")


def test_published_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        for name in ("checkpoint", "model"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").touch(mode=0o600)  # as safetensors does it
        checkpoints.publish_folder(tmp_path / "checkpoint", tmp_path / "checkpoint-1")
        checkpoints.publish_files(tmp_path / "model", tmp_path)
        (tmp_path / "new").touch()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}
