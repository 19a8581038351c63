"""Read rows from a file: JSON Lines, JSON or Parquet, also compressed."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, Final

from agent_envs.core.lookup import require_extra
from agent_envs.errors import DataError

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def read_records(path: str | Path, *, has_lines: bool = False) -> list[dict[str, Any]]:
    """Read every row of a file.

    Args:
        path: A ``.jsonl`` file with one object a line, a ``.json`` file with a list of objects
            (both also ``.gz``), or a ``.parquet`` file.
        has_lines: Whether a ``.json`` file has one object a line, too.

    Raises:
        DataError: If the file cannot be read or a row is no object; names file and row.
    """
    path = Path(path).expanduser()
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(SUFFIXES)}.")
    if "\0" in str(path) or path.is_fifo():  # which may never end
        raise DataError(f"{str(path)!r} is no regular file. Check the path.")
    try:
        records = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path, has_lines)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: cannot be read ({reason}). Check the path.") from None
    if not isinstance(records, list):
        raise DataError(f"{path}: must hold a list of rows, not {type(records).__name__}.")
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise DataError(f"{path}, row {number}: must be an object, not {kind}.")
    return records


def _read_json(path: Path, has_lines: bool) -> Any:
    # utf-8-sig also reads files without the mark that some editors put first.
    open_text: Any = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8-sig") as file:
        if not has_lines and path.name.endswith((".json", ".json.gz")):
            return _parsed(file.read(), str(path))
        lines = enumerate(file, start=1)
        return [_parsed(line, f"{path}, row {number}") for number, line in lines if line.strip()]


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from None


def _read_parquet(path: Path) -> list[Any]:
    require_extra("data", f"{path}: a Parquet file", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        # Opened here: given a folder, pyarrow would return no rows, or those of all its files.
        with path.open("rb") as file:
            rows: list[Any] = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: is not a Parquet file ({error}).") from None
    return rows
