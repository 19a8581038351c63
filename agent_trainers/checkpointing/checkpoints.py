"""Checkpoint folders that are written aside, listed with checksums, and then renamed."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from agent_envs.data.files import fsync_file, write_json
from agent_envs.errors import ConfigurationError

UNFINISHED: Final = "_unfinished"  # TRL does not upload names with a leading underscore
MANIFEST: Final = "checkpoint.json"
WEIGHTS: Final = ("model", "adapter_model", "pytorch_model")


def find_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint in `folder`, and newer ones with their damage."""
    steps = [int(n) for p in folder.glob("checkpoint-*") if (n := p.name[11:]).isdecimal()]
    damaged: list[str] = []
    for step in sorted(steps, reverse=True):
        checkpoint = folder / f"checkpoint-{step}"
        if (damage := find_damage(checkpoint)) is None:
            return checkpoint, damaged
        damaged.append(f"{checkpoint}: {damage}")
    return None, damaged


def find_damage(checkpoint: Path) -> str | None:
    """Return the first difference between a checkpoint and its list of files, if any."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            if digest(checkpoint / name) != expected:
                return f"{name} is damaged: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)} is missing"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST} or a file in it cannot be read ({error})"
    return None


def publish_folder(finished: Path, target: Path) -> None:
    """List a complete checkpoint's files, flush them, and rename the folder."""
    files = {str(path.relative_to(finished)): digest(path) for path in _files(finished)}
    write_json(finished / MANIFEST, {"files": files})
    flush(finished)
    if target.exists():  # damaged
        shutil.rmtree(target)
    finished.rename(target)
    _flush_folder(target.parent)


def publish_files(finished: Path, target: Path) -> None:
    """Move files into a folder one by one, the weights last, so that they are never alone."""
    flush(finished)
    for path in sorted(_files(finished), key=lambda path: path.name.startswith(WEIGHTS)):
        place = target / path.relative_to(finished)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    _flush_folder(target)


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


def flush(folder: Path) -> None:
    """Wait until all files in `folder` are on disk, with the umask's permissions."""
    for path in _files(folder):
        fsync_file(path)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _flush_folder(path)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Windows and some network file systems cannot do it
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
