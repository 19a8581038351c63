"""Checkpoint folders: whole or not there, checked before they are used, told apart by run.

A checkpoint is written into ``_unfinished/`` beside its place, gets a list of its files with their
checksums (``checkpoint.json``), is flushed to the disk and only then renamed to ``checkpoint-N``.
``run.json`` in the output folder says whose run the folder holds, so that a run never goes on from
what an earlier one left in the same folder.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import settle, write_json
from agent_envs.errors import CheckpointError, ConfigurationError

UNFINISHED: Final = "_unfinished"  # TRL leaves names with an underscore out of uploads
MANIFEST: Final = "checkpoint.json"
RUN_FILE: Final = "run.json"
WEIGHTS: Final = ("model", "adapter_model", "pytorch_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a look for a checkpoint to go on from found."""

    checkpoint: Path | None
    """The newest that can be used."""
    passed_over: tuple[str, ...]
    """Newer ones that cannot be used, each with the reason."""


def begin_run(folder: Path, run: str | None = None) -> str:
    """Note in `folder` which run it belongs to from now on; return the run's id.

    Args:
        folder: The output folder.
        run: The id of the run that goes on; a new one if not given.
    """
    run = run or uuid.uuid4().hex
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # left by a run that was killed
    write_json(folder / RUN_FILE, {"run": run})
    return run


def run_of(path: Path) -> str | None:
    """Return the id of the run that a checkpoint or an output folder belongs to, if it says so."""
    for name in (MANIFEST, RUN_FILE):
        try:
            record = json.loads((path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        run: str | None = record.get("run") if isinstance(record, dict) else None
        return run
    return None


def find_checkpoint(folder: Path) -> Search:
    """Look for the newest checkpoint of the run in `folder` that is whole and undamaged."""
    run = run_of(folder)
    passed_over: list[str] = []
    for checkpoint in reversed(_by_step(folder)):
        if run is not None and run_of(checkpoint) not in (run, None):
            continue  # an earlier run left it here
        if (damage := find_damage(checkpoint)) is None:
            return Search(checkpoint=checkpoint, passed_over=tuple(passed_over))
        passed_over.append(f"{checkpoint}: {damage}")
    return Search(checkpoint=None, passed_over=tuple(passed_over))


def find_damage(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint: the first file that is not what was written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"].items()
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so it was not written to the end"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, expected in files:
        try:
            size = (checkpoint / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if digest(checkpoint / name) != expected["sha256"]:
                return f"{name} is damaged: its checksum is not that of what was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def check_checkpoint(checkpoint: Path) -> None:
    """Refuse a checkpoint that a user named and that cannot be used.

    One without a list of files, as other trainers write them, is taken as it is.

    Raises:
        CheckpointError: If it is missing or damaged; the message names the file.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"There is no checkpoint {checkpoint}: no such folder.")
    if (checkpoint / MANIFEST).exists() and (damage := find_damage(checkpoint)) is not None:
        raise CheckpointError(
            f"Checkpoint {checkpoint} cannot be used: {damage}. Go on from an older one, or with "
            "--resume, which takes the newest that is whole."
        )


def describe_checkpoint(checkpoint: Path, **facts: Any) -> None:
    """Write the list of a checkpoint's files, the last thing to be written, and flush all of it."""
    files = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in _files(checkpoint)
    }
    write_json(checkpoint / MANIFEST, {**facts, "files": files})
    flush(checkpoint)


def publish_folder(finished: Path, target: Path) -> None:
    """Rename a folder that is complete to where others look for it."""
    replaced = finished.parent / f"replaced-{target.name}"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():  # of an earlier run, or damaged
        target.rename(replaced)
    finished.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    _flush_folder(target.parent)


def publish_files(finished: Path, target: Path) -> None:
    """Move files into a folder that others may read meanwhile: each at once, weights last.

    So weights that are there are never without what belongs to them.
    """
    flush(finished)
    for path in sorted(_files(finished), key=lambda path: path.name.startswith(WEIGHTS)):
        place = target / path.relative_to(finished)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    _flush_folder(target)
    shutil.rmtree(finished, ignore_errors=True)


def drop_old_checkpoints(
    folder: Path, *, limit: int | None, run: str, step: int, keep: Sequence[str | None] = ()
) -> None:
    """Delete the oldest checkpoints beyond `limit`; those of earlier runs go first.

    Args:
        folder: The output folder.
        limit: How many to keep; all of them if None or 0.
        run: The id of the run that goes on. Its newest checkpoint is always kept.
        step: The run's step. A later checkpoint of the same run is one that was passed over.
        keep: Paths to keep in any case.
    """
    if not limit or limit < 0:
        return
    kept = {Path(path).resolve() for path in keep if path is not None}

    def age(checkpoint: Path) -> tuple[bool, int]:
        number = _step(checkpoint)
        return (run_of(checkpoint) == run and number <= step, number)

    checkpoints = sorted(_by_step(folder), key=age)
    candidates = [path for path in checkpoints[:-1] if path.resolve() not in kept]
    for checkpoint in candidates[: max(0, len(checkpoints) - limit)]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def check_writable(folder: Path, option: str = "--output_dir") -> None:
    """Make the output folder, and refuse one that cannot be written to before work begins.

    `option` is what names it.

    Raises:
        ConfigurationError: If nothing can be written there; the message says why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigurationError(
            f"{option} {folder}: cannot be written to ({error.strerror}). Choose another "
            "folder, or make room or permissions there."
        ) from None


def storage_error(error: BaseException, what: str, folder: Path) -> CheckpointError:
    """Put a failure to write into words: what, where, why, what is safe, and what to do."""
    if "PytorchStreamWriter" in str(error) or "inline_container" in str(error):
        reason = "a file could not be written in full"  # PyTorch tells no more than that
    else:
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
    try:
        free = f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free there)"
    except OSError:
        free = ""
    last = find_checkpoint(folder).checkpoint
    safe = f"The last complete one, {last}, is untouched" if last else "There is none before it"
    return CheckpointError(
        f"{what} could not be written to {folder}: {reason}{free}. {safe}. Make room or "
        "permissions there, then go on with the same command and --resume."
    )


def is_storage_failure(error: BaseException) -> bool:
    """Tell a failure to write from a mistake in a program; libraries raise many kinds."""
    if isinstance(error, OSError):
        return True
    text = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return any(sign in text for sign in ("safetensors", "PytorchStreamWriter", "inline_container"))


def flush(folder: Path) -> None:
    """Wait until everything below `folder` is on the disk, with the modes of new files."""
    for path in _files(folder):
        settle(path)
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
    """Return the SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_step(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    return sorted((path for path in paths if _step(path) >= 0), key=_step)


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1
