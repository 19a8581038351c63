"""Folders of checkpoints: whole or not there, checked, told apart by run."""

import errno
import os

import pytest

from agent_envs import ConfigurationError
from agent_envs.errors import CheckpointError
from agent_trainers.checkpointing import checkpoints


@pytest.fixture
def write(tmp_path):
    """Write a checkpoint of a run at a step, as a trainer does."""

    def write(step, run="one", content=b"weights"):
        finished = tmp_path / checkpoints.UNFINISHED / f"checkpoint-{step}"
        (finished / "global_step").mkdir(parents=True)
        (finished / "model.safetensors").write_bytes(content)
        (finished / "global_step" / "shard.pt").write_bytes(b"deep")
        checkpoints.write_manifest(finished, run=run, step=step)
        checkpoints.publish_folder(finished, tmp_path / finished.name)
        return tmp_path / finished.name

    return write


def test_the_newest_whole_checkpoint_is_found_by_its_step(tmp_path, write):
    write(9)
    newest = write(10)
    found = checkpoints.find_checkpoint(tmp_path)
    assert found.checkpoint == newest
    assert found.damaged == ()


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", _cut, "model.safetensors has 6 bytes instead of 7"),
        ("model.safetensors", _flip, "model.safetensors is damaged: its checksum differs"),
        ("global_step/shard.pt", os.unlink, "global_step/shard.pt cannot be read (No such file"),
        ("checkpoint.json", os.unlink, "checkpoint.json is missing, so writing was interrupted"),
        ("checkpoint.json", _cut, None),
        ("checkpoint.json", lambda path: path.write_text("[]"), "checkpoint.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_file_and_the_reason(
    tmp_path, write, name, damage, reason
):
    good, bad = write(5), write(10)
    damage(bad / name)
    found = checkpoints.find_checkpoint(tmp_path)
    if reason is None:  # the last byte of the list is a line end: nothing is lost
        assert found.checkpoint == bad
        return
    assert found.checkpoint == good
    assert len(found.damaged) == 1
    assert str(bad) in found.damaged[0]
    assert reason in found.damaged[0]


def test_an_unfinished_folder_is_not_a_checkpoint(tmp_path, write):
    write(5)
    unfinished = tmp_path / checkpoints.UNFINISHED / "checkpoint-6"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"wei")
    assert checkpoints.find_checkpoint(tmp_path).checkpoint == tmp_path / "checkpoint-5"
    checkpoints.begin_run(tmp_path)
    assert not unfinished.exists()


def test_checkpoints_of_an_earlier_run_are_ignored(tmp_path, write):
    old = checkpoints.begin_run(tmp_path)
    write(60, run=old)
    new = checkpoints.begin_run(tmp_path)
    assert checkpoints.find_checkpoint(tmp_path).checkpoint is None
    write(20, run=new)
    assert checkpoints.find_checkpoint(tmp_path).checkpoint == tmp_path / "checkpoint-20"


def test_a_checkpoint_of_the_same_step_replaces_the_old_one(tmp_path, write):
    write(5, content=b"before")
    assert (write(5, content=b"after") / "model.safetensors").read_bytes() == b"after"
    assert checkpoints.find_damage(tmp_path / "checkpoint-5") is None


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (None, [5, 10, 15, 40]),
        (0, [5, 10, 15, 40]),
        (2, [10, 15]),  # 40 is of an earlier run and goes first
        (1, [15]),
    ],
)
def test_old_checkpoints_go_beyond_the_limit_and_the_newest_stays(tmp_path, write, limit, kept):
    write(40, run="earlier")
    for step in (5, 10, 15):
        write(step)
    checkpoints.drop_old_checkpoints(tmp_path, limit=limit, run="one", step=15)
    left = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert left == kept


def test_a_damaged_later_checkpoint_is_deleted_before_good_ones(tmp_path, write):
    for step in (5, 10, 7):  # 10 was damaged, so the run went on from 5 and is at 7
        write(step)
    checkpoints.drop_old_checkpoints(tmp_path, limit=2, run="one", step=7)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-7"}


def test_the_best_checkpoint_is_kept(tmp_path, write):
    for step in (5, 10, 15):
        write(step)
    best = str(tmp_path / "checkpoint-5")
    checkpoints.drop_old_checkpoints(tmp_path, limit=2, run="one", step=15, keep=best)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        "checkpoint-5",
        "checkpoint-15",
    }


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
    assert (target / "model.safetensors").read_text() == "model.safetensors"


def test_a_named_checkpoint_that_is_missing_or_damaged_is_refused(tmp_path, write):
    with pytest.raises(CheckpointError, match=r"checkpoint-1: no such folder"):
        checkpoints.check_checkpoint(tmp_path / "checkpoint-1")
    _flip(write(2) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged.*--resume"):
        checkpoints.check_checkpoint(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "checkpoint.json").unlink()
    checkpoints.check_checkpoint(tmp_path / "checkpoint-2")  # as another trainer wrote it


def test_an_output_folder_that_cannot_be_written_to_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match=r"--output_dir .*file/run.*Not a directory"):
        checkpoints.check_writable(file / "run")


def test_the_error_for_a_full_disk_names_reason_and_last_checkpoint(tmp_path, write):
    write(5)
    error = checkpoints.storage_error(
        OSError(errno.ENOSPC, "No space left on device"), "The checkpoint of step 10", tmp_path
    )
    for part in ("step 10", str(tmp_path), "No space left", "MB are free", "checkpoint-5",
                 "is untouched", "--resume"):  # fmt: skip
        assert part in str(error)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_published_files_have_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        for name in ("checkpoint", "model"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").touch(mode=0o600)  # as safetensors does it
        checkpoints.write_manifest(tmp_path / "checkpoint", run="r", step=1)
        checkpoints.publish_files(tmp_path / "model", tmp_path)
        (tmp_path / "new").touch()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode for path in files} == {(tmp_path / "new").stat().st_mode}
