"""Task lists and episode results of a run, and the folder that holds them."""

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, InstanceOf

from agent_envs.data.files import atomic_path, write_json, write_text
from agent_envs.errors import DataError
from agent_leaderboard.records.manifest import Manifest, Protocol, read_manifest, to_json
from agent_leaderboard.records.reading import (
    MAX_FILE_BYTES,
    Record,
    file_sha256,
    parse_json,
    read_bytes,
    read_text,
    validated,
)
from agent_trainers.trajectory import StopReason

MANIFEST: Final = "manifest.json"
TASKS: Final = "tasks.json"
RESULTS: Final = "results.parquet"
CHECKSUMS: Final = "checksums.json"
FILES: Final = (MANIFEST, TASKS, RESULTS, CHECKSUMS)
"""Files of a complete run."""

Labels = dict[str, str | int]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Cell = tuple[str, str]
"""Slugs of an environment and an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry(Record):
    """A task of a fixed list."""

    task: Index
    """Task index in the environment."""
    task_id: str
    sha256: str
    """Hash of the task's content; keyed if its text is not public."""
    labels: Labels
    """Groups of the breakdown: ``type``, ``hops``, ``level``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult(Record):
    """One episode: a row of ``results.parquet``."""

    environment: str
    agent: str
    task: Index
    sample: Index
    success: bool
    return_: Annotated[float, Field(alias="return")]
    """Sum of the rewards."""
    stop_reason: StopReason
    error: InstanceOf[str] | None
    """Infrastructure failure that outlived its retries: the episode is no success."""
    calls: Count
    """Model calls of all attempts; so are the tokens."""
    prompt_tokens: Count
    completion_tokens: Count
    money: float | None
    """Cost by the agent's prices; None without prices."""
    seconds: Annotated[float, Field(ge=0, le=1e9)] | None
    """Duration on the machine of the run; None if unknown."""
    actions: list[InstanceOf[str]]
    """Text of each turn, which suffices to replay the episode. Encrypted, like `attempts`, if the
    environment's text is not public."""
    rewards: list[float]
    reward_terms: list[dict[str, float]]
    errors: list[str | None]
    """Error code of each turn, such as ``bad_json``."""
    metrics: dict[str, float]
    attempts: list[list[InstanceOf[str]]]
    """Actions of other attempts, which cost but do not count."""

    @property
    def is_scored(self) -> bool:
        """Whether the episode is evidence about the agent."""
        return self.error is None

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Environment, agent, task and sample."""
        return self.environment, self.agent, self.task, self.sample


_SCALARS: Final = {
    "environment": pa.string(), "agent": pa.string(), "task": pa.int64(), "sample": pa.int64(),
    "success": pa.bool_(), "return": pa.float64(), "stop_reason": pa.string(),
    "error": pa.string(), "calls": pa.int64(), "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(), "money": pa.float64(), "seconds": pa.float64(),
}  # fmt: skip
NESTED: Final = ("actions", "rewards", "reward_terms", "errors", "metrics", "attempts")
"""Columns of JSON in ASCII, which can hold lone surrogates."""
SCHEMA: Final = pa.schema([*_SCALARS.items(), *((name, pa.string()) for name in NESTED)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The content of a run folder."""

    manifest: Manifest
    tasks: Mapping[str, Sequence[TaskEntry]]
    """Task list of each environment."""
    results: Mapping[Cell, Sequence[EpisodeResult]]
    """Episodes of each environment and agent, by task and sample."""


def episode_seed(protocol: Protocol, task: int, sample: int) -> int:
    """Return the seed of an episode: the same for every agent."""
    return int(np.random.SeedSequence([protocol.seed, task, sample]).generate_state(1)[0] >> 1)


def list_episodes(entries: Sequence[TaskEntry], protocol: Protocol) -> list[tuple[TaskEntry, int]]:
    """Return task and sample of every episode of a task list, in order."""
    return [(entry, sample) for entry in entries for sample in range(protocol.samples_per_task)]


def read_run(folder: Path) -> Run:
    """Read a complete run; a `DataError` names file and field."""
    manifest = read_manifest(folder / MANIFEST)
    text = read_text(folder / TASKS)
    tasks: dict[str, list[TaskEntry]] = validated(
        dict[str, list[TaskEntry]], parse_json(text, folder / TASKS), folder / TASKS
    )
    if tasks_text(tasks) != text:
        raise DataError(f"{folder / TASKS}: is not in the canonical form.")
    most = manifest.protocol.samples_per_task * sum(
        len(tasks.get(environment.slug, ())) for environment, _ in manifest.cells
    )
    if not (folder / RESULTS).exists():
        raise DataError(f"{folder}: the run is not complete. Repeat the command to resume it.")
    results: dict[Cell, list[EpisodeResult]] = {(e.slug, a.slug): [] for e, a in manifest.cells}
    for number, result in enumerate(read_results(folder / RESULTS, most), start=1):
        if (result.environment, result.agent) not in results:
            raise DataError(f"{folder / RESULTS}, row {number}: field 'agent': is not listed.")
        results[result.environment, result.agent].append(result)
    return Run(manifest=manifest, tasks=tasks, results=results)


def write_run(folder: Path, run: Run) -> None:
    """Write a complete run, deterministically; the checksums come last."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    write_text(folder / MANIFEST, to_json(run.manifest))
    write_text(folder / TASKS, tasks_text(run.tasks))
    cells = ((e.slug, a.slug) for e, a in run.manifest.cells)
    rows = [to_row(one) for cell in cells for one in run.results[cell]]
    with atomic_path(folder / RESULTS) as temporary:
        pq.write_table(
            pa.Table.from_pylist(rows, schema=SCHEMA), temporary, compression="zstd",
            use_dictionary=False, store_schema=False, write_statistics=False,
        )  # fmt: skip
    write_json(folder / CHECKSUMS, make_checksums(folder))


def make_checksums(folder: Path) -> dict[str, str]:
    """Return the digest of each other file."""
    return {name: file_sha256(folder / name) for name in FILES if name != CHECKSUMS}


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums of a run."""
    path = folder / CHECKSUMS
    digests: dict[str, str] = validated(dict[str, str], parse_json(read_text(path), path), path)
    return digests


def task_list_sha256(entries: Sequence[TaskEntry]) -> str:
    """Return the digest of a task list."""
    text = json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2) + "\n"
    return hashlib.sha256(text.encode()).hexdigest()


def tasks_text(tasks: Mapping[str, Sequence[TaskEntry]]) -> str:
    """Return the content of ``tasks.json``: one line per environment."""
    lines = (
        f"{json.dumps(slug)}: {json.dumps([dataclasses.asdict(entry) for entry in own])}"
        for slug, own in tasks.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


# Results


def read_results(path: Path, max_rows: int) -> Iterator[EpisodeResult]:
    """Yield the rows of a results file that may come from a stranger."""
    try:
        file = pq.ParquetFile(io.BytesIO(read_bytes(path)))
        _check_form(path, file, max_rows)
        batches = file.iter_batches(batch_size=1_000)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield from_row(row, f"{path}, row {number}")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, pa.ArrowMemoryError):
            raise
        raise DataError(f"{path}: is not a readable Parquet file ({error}).") from None


def _check_form(path: Path, file: pq.ParquetFile, max_rows: int) -> None:
    """Refuse another schema, and encodings that expand to more than the file declares."""
    metadata = file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    encodings = {name for column in columns for name in column.encodings}
    if file.schema_arrow != SCHEMA or metadata.metadata:
        problem = "has other columns than a results file"
    elif metadata.num_rows > max_rows:
        problem = f"has {metadata.num_rows} rows; the run has {max_rows} episodes"
    elif not encodings <= {"PLAIN", "RLE"} or {c.compression for c in columns} - {"ZSTD"}:
        problem = "has an encoding that results files do not use"
    elif sum(column.total_uncompressed_size for column in columns) > MAX_FILE_BYTES:
        problem = f"unpacks to more than {MAX_FILE_BYTES:,} bytes"
    else:
        return
    raise DataError(f"{path}: {problem}.")


def to_row(result: EpisodeResult) -> dict[str, Any]:
    """Return the row of an episode."""
    row = dataclasses.asdict(result)
    row["return"] = row.pop("return_")
    row["stop_reason"] = str(result.stop_reason)
    return row | {name: _json(row[name]) for name in NESTED}


def from_row(row: Mapping[str, Any], place: str) -> EpisodeResult:
    """Return the episode of a row, which must have the form that `to_row` gives."""
    nested = {name: parse_json(row[name] or "", f"{place}, field {name!r}") for name in NESTED}
    result: EpisodeResult = validated(EpisodeResult, {**row, **nested}, place)
    for name in NESTED:
        if _json(getattr(result, name)) != row[name]:
            raise DataError(f"{place}: field {name!r}: is not in the canonical form.")
    return result


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
