"""Atomic writes of files."""

import contextlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds.

    A reader sees the old file or the new one, even if the process is killed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        fsync_file(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def fsync_file(path: Path) -> None:
    """Flush a file to the disk, and give it the mode of new files.

    Some writers, such as safetensors, make files that only their owner can read.
    """
    probe = path.with_name(f".{uuid.uuid4().hex}")
    probe.touch()
    path.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.unlink()
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically, indented; see `json_text`."""
    write_text(path, json_text(value, indent=2, ensure_ascii=False) + "\n")


def json_text(value: Any, *, default: Callable[[Any], Any] | None = None, **options: Any) -> str:
    """Return JSON as `json.dumps` does, with null for NaN and infinity, which JSON lacks."""
    plain = json.loads(json.dumps(value, default=default), parse_constant=lambda _: None)
    return json.dumps(plain, **options)
