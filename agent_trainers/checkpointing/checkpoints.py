"""Atomic checkpoint folders with checksums, each labelled with its run.

A checkpoint is written into ``_unfinished/``, gets a manifest of its files (``checkpoint.json``),
is flushed to disk and then renamed to ``checkpoint-N``. ``run.json`` in the output folder names the
run, so that it never resumes from a checkpoint of an earlier one.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent_envs.data.files import fsync_file, write_json
from agent_envs.errors import CheckpointError, ConfigurationError

UNFINISHED: Final = "_unfinished"  # TRL does not upload names with a leading underscore
MANIFEST: Final = "checkpoint.json"
RUN_FILE: Final = "run.json"
WEIGHTS: Final = ("model", "adapter_model", "pytorch_model")


class Found(NamedTuple):
    """Result of `find_checkpoint`."""

    checkpoint: Path | None
    """The newest undamaged checkpoint."""
    damaged: tuple[str, ...]
    """Newer ones, each with the reason."""


def begin_run(folder: Path, run: str | None = None) -> str:
    """Record the run in its output folder; return its id, a new one if `run` is None."""
    run = run or uuid.uuid4().hex
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # of a killed run
    write_json(folder / RUN_FILE, {"run": run})
    return run


def run_of(path: Path) -> str | None:
    """Return the id of the run that a checkpoint or an output folder belongs to, if recorded."""
    for name in (MANIFEST, RUN_FILE):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((path / name).read_text(encoding="utf-8"))
            return record.get("run") if isinstance(record, dict) else None
    return None


def find_checkpoint(folder: Path) -> Found:
    """Return the newest undamaged checkpoint of the run in `folder`."""
    run = run_of(folder)
    damaged: list[str] = []
    for checkpoint in reversed(_by_step(folder)):
        if run is not None and run_of(checkpoint) not in (run, None):
            continue  # of an earlier run
        if (damage := find_damage(checkpoint)) is None:
            return Found(checkpoint, tuple(damaged))
        damaged.append(f"{checkpoint}: {damage}")
    return Found(None, tuple(damaged))


def find_damage(checkpoint: Path) -> str | None:
    """Return the first difference between a checkpoint and its manifest, if any."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"].items()
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so writing was interrupted"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, expected in files:
        try:
            size = (checkpoint / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if digest(checkpoint / name) != expected["sha256"]:
                return f"{name} is damaged: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def check_checkpoint(checkpoint: Path) -> None:
    """Raise `CheckpointError` if a checkpoint is missing or damaged.

    One of another trainer, without a manifest, is accepted.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"There is no checkpoint {checkpoint}: no such folder.")
    if (checkpoint / MANIFEST).exists() and (damage := find_damage(checkpoint)) is not None:
        raise CheckpointError(
            f"Checkpoint {checkpoint} cannot be used: {damage}. Resume from an older one, or use "
            "--resume, which takes the newest undamaged one."
        )


def write_manifest(checkpoint: Path, **facts: Any) -> None:
    """Write a checkpoint's manifest, with `facts`, and flush all of it."""
    files = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in _files(checkpoint)
    }
    write_json(checkpoint / MANIFEST, {**facts, "files": files})
    flush(checkpoint)


def publish_folder(finished: Path, target: Path) -> None:
    """Rename a complete folder to its final place."""
    replaced = finished.parent / f"replaced-{target.name}"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():  # of an earlier run, or damaged
        target.rename(replaced)
    finished.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    _flush_folder(target.parent)


def publish_files(finished: Path, target: Path) -> None:
    """Move files into a folder one by one, the weights last, so that they are never alone."""
    flush(finished)
    for path in sorted(_files(finished), key=lambda path: path.name.startswith(WEIGHTS)):
        place = target / path.relative_to(finished)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    _flush_folder(target)
    shutil.rmtree(finished, ignore_errors=True)


def drop_old_checkpoints(
    folder: Path, *, limit: int | None, run: str, step: int, keep: str | None = None
) -> None:
    """Delete the oldest checkpoints beyond `limit` (None or 0: none).

    Those of earlier runs go first, and those later than `step`, which were damaged. The newest of
    `run` and the checkpoint `keep` always stay.
    """
    if not limit or limit < 0:
        return

    def age(checkpoint: Path) -> tuple[bool, int]:
        number = _step(checkpoint)
        return (run_of(checkpoint) == run and number <= step, number)

    ordered = sorted(_by_step(folder), key=age)
    kept = None if keep is None else Path(keep).resolve()
    candidates = [path for path in ordered[:-1] if path.resolve() != kept]
    for checkpoint in candidates[: max(0, len(ordered) - limit)]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def check_writable(folder: Path, option: str = "--output_dir") -> None:
    """Make a folder; raise `ConfigurationError`, naming `option`, if nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigurationError(
            f"{option} {folder}: cannot be written to ({error.strerror}). Choose another "
            "folder, or free space or change permissions there."
        ) from None


def storage_error(error: BaseException, what: str, folder: Path) -> CheckpointError:
    """Return an error with what could not be written, why, and the last complete checkpoint."""
    reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
    if _is_torch_writer(str(error)):  # PyTorch does not say more
        reason = "a file could not be written completely"
    with contextlib.suppress(OSError):
        reason += f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free there)"
    last = find_checkpoint(folder).checkpoint
    safe = f"The last complete one, {last}, is untouched" if last else "There is none before it"
    return CheckpointError(
        f"{what} could not be written to {folder}: {reason}. {safe}. Free space or change "
        "permissions there, then rerun the same command with --resume."
    )


def is_storage_failure(error: BaseException) -> bool:
    """Return whether an error is a failure to write; libraries raise many kinds."""
    text = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return isinstance(error, OSError) or "safetensors" in text or _is_torch_writer(text)


def _is_torch_writer(text: str) -> bool:
    return "PytorchStreamWriter" in text or "inline_container" in text


def flush(folder: Path) -> None:
    """Wait until all files in `folder` are on disk, with the umask's permissions."""
    for path in _files(folder):
        fsync_file(path)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Windows and some network file systems cannot do it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_step(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    return sorted((path for path in paths if _step(path) >= 0), key=_step)


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1
