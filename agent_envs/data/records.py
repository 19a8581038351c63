"""Read rows from a file: JSON Lines, JSON or Parquet, also compressed."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from agent_envs.core.lookup import require_extra
from agent_envs.errors import DataError

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Read every row of a file.

    Args:
        path: A ``.jsonl`` file with one object a line, a ``.json`` file with a list of objects
            (both also ``.gz``), or a ``.parquet`` file.

    Raises:
        DataError: If the file cannot be read or a row is no object; names file and row.
    """
    path = Path(path).expanduser()
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(SUFFIXES)}.")
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        # utf-8-sig also reads files without the mark that some editors put first.
        open_text: Any = gzip.open if path.suffix == ".gz" else open
        with open_text(path, "rt", encoding="utf-8-sig") as file:
            is_lines = path.name.endswith((".jsonl", ".jsonl.gz"))
            return list(_read_lines(file, path)) if is_lines else _read_list(file, path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: is not a sound gzip file ({error}). Copy it again.") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path}: cannot be read ({reason}). Check the path.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}).") from None


def _read_lines(file: IO[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield _checked(_parsed(line, f"{path}, row {number}"), path, number)


def _read_list(file: IO[str], path: Path) -> list[dict[str, Any]]:
    records = _parsed(file.read(), str(path))
    if not isinstance(records, list):
        raise DataError(f"{path}: must hold a list of rows, not {type(records).__name__}.")
    return [_checked(record, path, number) for number, record in enumerate(records, start=1)]


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from None


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    require_extra("data", f"{path}: a Parquet file", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        # Opened here: given a folder, pyarrow would return no rows, or those of all its files.
        with path.open("rb") as file:
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: is not a Parquet file ({error}).") from None
    return rows


def _checked(record: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{path}, row {number}: must be an object, not {type(record).__name__}.")
    return record
