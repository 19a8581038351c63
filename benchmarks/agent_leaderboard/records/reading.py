"""Reading files of others: what is wrong is one error that names file, line and field."""

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from agent_envs.errors import DataError


class Record:
    """What is read from JSON: no field more, none less, and no number that JSON lacks."""

    __slots__ = ()
    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(
        extra="forbid", allow_inf_nan=False
    )


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
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
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def parse_json(text: str, place: str | Path) -> Any:
    """Return what JSON text holds.

    Raises:
        DataError: If it is no JSON; begins with `place`.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from None


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
