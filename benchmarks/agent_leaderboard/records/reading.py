"""Reading untrusted files: every error is a `DataError` that names file, line and field."""

import functools
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

import pydantic

from agent_envs.core.command_line import unique_keys
from agent_envs.errors import DataError

MAX_FILE_BYTES: Final = 256 * 2**20
"""Largest file of a run; published ones have less than a tenth."""
MAX_DEPTH: Final = 50
"""Deepest nesting of JSON."""


class Record:
    """Base of dataclasses read from JSON: exactly their fields, and finite numbers."""

    __slots__ = ()
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(
        extra="forbid", allow_inf_nan=False
    )


def open_plain(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file: no pipe, no device, and no link unless `follow`."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path}: cannot be read (not a regular file).")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of a run, of at most `MAX_FILE_BYTES`."""
    with open_plain(path, follow=False) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{path}: is larger than {MAX_FILE_BYTES:,} bytes.")
    return content


def read_text(path: Path) -> str:
    """Return the text of a regular file of a run; see `read_bytes`."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error.reason}).") from None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str, place: str | Path) -> Any:
    """Parse JSON without repeated keys, nested at most `MAX_DEPTH` deep."""
    try:
        value = json.loads(text, parse_constant=_refuse_number, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for group in map(_items, level) for item in group]
    if level:
        raise DataError(f"{place}: is nested deeper than {MAX_DEPTH} levels.")
    return value


def _refuse_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def validated(kind: Any, value: Any, place: str | Path) -> Any:
    """Convert parsed JSON to a `kind`; an error begins with `place` and names the field."""
    try:
        return type_adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        name, message = first_problem(error)
        field = f"field {name!r}: " if name else ""
        raise DataError(f"{place}: {field}{message}.") from None


def first_problem(error: pydantic.ValidationError) -> tuple[str, str]:
    """Return the first wrong field in dots (empty for the whole value), and the message."""
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")


@functools.cache
def type_adapter(kind: Any) -> Any:
    """Return pydantic's adapter of a type."""
    return pydantic.TypeAdapter(kind)
