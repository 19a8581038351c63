"""The task lists and the results of a run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, InstanceOf

from agent_envs.errors import DataError
from agent_leaderboard.records.reading import Record, parse_json, validated
from agent_trainers.trajectory import StopReason

Labels = dict[str, str | int]
TaskIndex = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(lt=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry(Record):
    """A task of a fixed list."""

    task: TaskIndex
    """Its index in the environment."""
    task_id: str
    sha256: str
    """Hash of its content: question, answers and whatever else defines it. Keyed where its text is
    not public (`agent_leaderboard.records.sealing`)."""
    labels: Labels
    """What results are broken down by: ``type``, ``hops``, ``level``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUsage(Record):
    """What an episode cost, all attempts together."""

    calls: Count
    prompt_tokens: Count
    completion_tokens: Count
    money: float | None
    """By the agent's prices; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine(Record):
    """One episode."""

    environment: str
    """Slug."""
    agent: str
    """Slug."""
    task: TaskIndex
    task_id: str
    task_sha256: str
    sample: TaskIndex
    """Which of the task's samples, from 0."""
    seed: int
    """Of environment and agent; given by the protocol."""
    actions: list[InstanceOf[str]]
    """What the agent wrote, turn by turn: enough to play the episode again. Sealed where the
    environment's text is not public, as `attempts` are."""
    rewards: list[float]
    reward_terms: list[dict[str, float]]
    errors: list[str | None]
    """Code of the mistake of each step, such as ``bad_json``."""
    metrics: dict[str, float]
    return_: Annotated[float, Field(alias="return")]
    """Sum of the rewards; ``return`` in the file."""
    success: bool
    stop_reason: StopReason
    error: InstanceOf[str] | None
    """An infrastructure fault that outlived its retries: the episode is no success."""
    attempts: list[list[InstanceOf[str]]]
    """Actions of other attempts, which cost but do not count."""
    usage: LineUsage
    labels: Labels

    @property
    def is_scored(self) -> bool:
        """Whether the episode says anything about the agent."""
        return self.error is None

    @property
    def task_entry(self) -> TaskEntry:
        """Its task, as a task list names it."""
        return TaskEntry(
            task=self.task, task_id=self.task_id, sha256=self.task_sha256, labels=self.labels
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsLine(Record):
    """How long an episode took."""

    task: TaskIndex
    sample: TaskIndex
    seconds: Annotated[float, Field(ge=0, le=1e9)]


def tasks_text(entries: Sequence[TaskEntry]) -> str:
    """Return a task list's file."""
    return json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2) + "\n"


def line_record(line: ResultLine) -> dict[str, Any]:
    """Return a result line as JSON."""
    record = dataclasses.asdict(line)
    record["return"] = record.pop("return_")
    return record


def write_line(record: Mapping[str, Any]) -> str:
    """Write one JSON line, the same for the same record; ASCII, so that lone surrogates survive."""
    return json.dumps(record, sort_keys=True, allow_nan=False) + "\n"


def parse_seconds(text: str, place: str) -> SecondsLine:
    """Read how long an episode took; a `DataError` begins with `place`."""
    line: SecondsLine = validated(SecondsLine, parse_json(text, place), place)
    return line


def parse_line(text: str, place: str) -> ResultLine:
    """Read a result line, without its end.

    Raises:
        DataError: If it is malformed, or not in the form in which `write_line` writes it; begins
            with `place`.
    """
    record = parse_json(text, place)
    if not isinstance(record, dict):
        raise DataError(f"{place}: is no JSON object.")
    line: ResultLine = validated(ResultLine, record, place)
    if write_line(line_record(line)) != text + "\n":
        raise DataError(f"{place}: is not in the form in which results are written.")
    return line
