"""Reading files of others: what is wrong is one error that names file, line and field."""

import functools
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import pydantic

from agent_envs.errors import DataError

MAX_FILE_BYTES: Final = 256 * 2**20
"""What a file of a run may hold; the published ones hold less than a hundredth."""
MAX_DEPTH: Final = 50
"""How deep JSON may be nested: more is no setting, and takes Python's stack."""


class Record:
    """What is read from JSON: no field more, none less, and no number that JSON lacks."""

    __slots__ = ()
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(
        extra="forbid", allow_inf_nan=False
    )


def open_plain(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a plain file: no pipe, which would block, no device, and on request no link.

    Raises:
        DataError: If it is none, or cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path}: cannot be read (is no plain file).")
    return os.fdopen(handle, "rb")


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a plain file of a run.

    Raises:
        DataError: If it cannot be read, or holds more than `max_bytes`.
    """
    with open_plain(path, follow=False) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DataError(f"{path}: holds more than {max_bytes:,} bytes.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error.reason}).") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of a file with its number, from 1.

    Raises:
        DataError: If the file cannot be read, or its last line is not whole.
    """
    *lines, rest = read_text(path).split("\n")
    yield from enumerate(lines, start=1)
    if rest:
        raise DataError(f"{path}, line {len(lines) + 1}: is cut off.")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content.

    Raises:
        DataError: If it cannot be read.
    """
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str, place: str | Path) -> Any:
    """Return what JSON text holds.

    Raises:
        DataError: If it is no JSON, says something twice, or is nested deeper than `MAX_DEPTH`;
            begins with `place`.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_no_key_twice)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for group in map(_items, level) for item in group]
    if level:
        raise DataError(f"{place}: is nested deeper than {MAX_DEPTH} levels.")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; where a key is there twice, one reader takes the first, one the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def validated(kind: Any, value: Any, place: str | Path) -> Any:
    """Return parsed JSON as a `kind`.

    Raises:
        DataError: If it is none; begins with `place` and names the field.
    """
    try:
        return type_adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        name, message = first_problem(error)
        field = f"field {name!r}: " if name else ""
        raise DataError(f"{place}: {field}{message}.") from None


def first_problem(error: pydantic.ValidationError) -> tuple[str, str]:
    """Return the first field that is wrong, in dots (empty for the whole), and what is wrong."""
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")


@functools.cache
def type_adapter(kind: Any) -> Any:
    """Return pydantic's adapter of a type, made once."""
    return pydantic.TypeAdapter(kind)
