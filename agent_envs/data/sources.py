"""Sources of rows: a file, a data set on the hub, or a ``datasets.Dataset``."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agent_envs.core.lookup import require_extra
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import datasets

Row = TypeVar("Row")
Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A public data set: its common name, and path, configuration and default split on the hub."""

    name: str
    path: str
    configuration: str | None = None
    split: str = "test"
    licence: str = "see the hub's card"


@dataclass(frozen=True, slots=True)
class Source:
    """A source of rows, as a key of caches."""

    name: str
    """The path of a file, or a name for error messages."""
    version: Hashable
    """Distinguishes contents under the same name."""
    rows: Callable[[], Rows] = dataclasses.field(compare=False)
    """Reads the rows; a DataError if that fails."""


def file_source(path: str | Path, *, has_lines: bool = False) -> Source:
    """Return a file as a source; a DataError if there is none. See `read_records`."""
    path = Path(path).expanduser()
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the path.") from None
    version = (status.st_size, status.st_mtime_ns)
    rows = functools.partial(read_records, path, has_lines=has_lines)
    return Source(str(path), version, rows)


def hub_source(hub: Hub, split: str) -> Source:
    """Return a split of a public data set, which is loaded from the hub or its cache."""

    def load() -> Rows:
        require_extra("data", f"The hub's data set {hub.path}", "datasets")
        import datasets

        try:
            rows: Rows = datasets.load_dataset(hub.path, hub.configuration, split=split)
        except Exception as error:
            raise DataError(
                f"The hub's data set {hub.path} ({hub.configuration or 'default'}, split "
                f"{split!r}) could not be loaded: {type(error).__name__}: {error}. Pass data= with "
                f"a local file of {hub.name} rows (JSONL, JSON, Parquet; also .gz), or check the "
                "network and the split's name."
            ) from error
        return rows

    return Source(f"{hub.path}:{split}", hub, load)


def field(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row; a DataError if it is missing or None."""
    if row.get(name) is None:
        raise DataError(f"field {name!r} is missing (found: {', '.join(row) or 'nothing'}).")
    return row[name]


def text_field(row: Mapping[str, Any], name: str) -> str:
    """Return a field of a row that must hold text; else a DataError names it."""
    value = field(row, name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"field {name!r} must be a non-empty string, not {value!r}.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec(Generic[Row]):
    """A data set: its source, and how its rows are read."""

    read: Callable[[Mapping[str, Any], int], Row | None]
    """Takes a row and its index; returns None to leave it out, or raises a DataError."""
    form: str
    """The form of a row, in a sentence; part of every error."""
    hub: Hub | None = None
    """The public data set, if there is one."""

    def find(self, data: "str | Path | datasets.Dataset | None", split: str | None) -> Source:
        """Return the source: the file or data set `data`, or `split` of the public data set."""
        if data is not None and split is not None:
            raise ConfigurationError(
                f"split={split!r} chooses a split of the public data set, and has no effect on "
                "data=. Leave one of them out."
            )
        if isinstance(data, str | Path):
            return file_source(data)
        if data is not None:  # the source keeps it alive, so that its id is not used again
            rows: Rows = data
            return Source("dataset", id(data), lambda: rows)
        if self.hub is None:
            raise DataError(f"There is no public data set; pass data= with a file. {self.form}")
        return hub_source(self.hub, split or self.hub.split)

    def read_all(self, source: Source) -> list[Row]:
        """Read every row; a DataError names source, row and field of a malformed one."""
        rows: list[Row] = []
        for index, record in enumerate(source.rows()):
            try:
                row = self.read(record, index)
            except Exception as error:  # `read` may be a user's
                text = error if isinstance(error, DataError) else f"{error!r}."
                raise DataError(f"{source.name}, row {index + 1}: {text} {self.form}") from error
            if row is not None:
                rows.append(row)
        if not rows:
            raise DataError(f"{source.name}: there are no rows. {self.form}")
        return rows
