"""What a run of the leaderboard leaves in its folder, and how it is read and written.

::

    manifest.json                 protocol, environments, agents: no times, no machine
    tasks/<environment>.json      the fixed list of tasks, with a hash of each one's content
    results/<environment>/<agent>.jsonl   one line an episode, by task and sample
    seconds/<environment>/<agent>.jsonl   what varies from run to run, so it stands apart
    checksums.json                SHA-256 of all of these but seconds; made when the run is complete
    leaderboard.{md,csv,html}     made from the rest

Results hold no question, observation or gold answer: the data sets have licences of their own.
Files come from others too, so everything is checked as it is read, and a line counts only in the
very form in which it is written here.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pydantic
from pydantic import InstanceOf

from agent_envs.data.files import write_json, write_text
from agent_envs.errors import DataError
from agent_trainers.trajectory import StopReason

FORMAT_VERSION: Final = 1
_SLUG: Final = r"^[a-z0-9][a-z0-9._-]{0,79}$"
_STRICT: Final = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)

Labels = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How every agent is measured."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    samples_per_task: int = 1
    """Episodes of each task."""
    temperature: float = 1.0
    """Sampling temperature of the agents on a model, unless their settings say otherwise."""
    seed: int = 0
    """What every episode's seed is derived from, and which tasks are drawn."""
    max_retries: int = 2
    """How often an episode is played again after an infrastructure fault, never a wrong answer."""
    concurrency: int = 64
    """Episodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file that tasks or passages come from."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    name: str
    """Its path below the data folder."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord:
    """An environment of a run."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    slug: str
    """Its name in the run, and in file names."""
    id: str
    """Gymnasium's id; ends with the environment's version."""
    kwargs: dict[str, Any]
    """Arguments; ``${data}`` stands for the data folder."""
    max_turns: int | None
    reward_terms: dict[str, float]
    """Weight of each reward term that is on."""
    outcome_terms: list[str]
    """Which of them reward the outcome; the others reward the way."""
    num_tasks: int
    tasks_path: str
    tasks_sha256: str
    """Of the task list."""
    data: list[DataFile]
    contamination: str
    """Whether models may have seen the tasks."""
    is_text_public: bool
    """Whether questions and observations may be published: true of generated tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a model's tokens cost."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    prompt: float
    """Of a million prompt tokens."""
    completion: float
    """Of a million completion tokens."""
    currency: str = "USD"

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return what these tokens cost."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """An agent of a run."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    slug: str
    """Its name in file names."""
    name: str
    """Its name in tables."""
    kind: str
    """A key of `agent_leaderboard.agents.agent.AGENTS`."""
    model: str | None
    """The model's name; None where there is no model."""
    weights_sha256: dict[str, str]
    """Of the weights files of a local model, by name."""
    tool_format: str | None
    """The tool format it acts in; None for the environment's own."""
    settings: dict[str, Any]
    """Its settings, without the model."""
    train: dict[str, Any] | None
    """Arguments of ``agent-r1-train``, where the run trained the model itself."""
    prices: Prices | None
    packages: dict[str, str]
    """Versions it was run with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An environment that was not run."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a run consists of."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    format_version: int
    protocol: Protocol
    environments: list[EnvironmentRecord]
    agents: list[AgentRecord]
    left_out: list[LeftOut]

    def environment(self, slug: str) -> EnvironmentRecord:
        """Return the environment of that name."""
        return next(record for record in self.environments if record.slug == slug)

    def agent(self, slug: str) -> AgentRecord:
        """Return the agent of that name."""
        return next(record for record in self.agents if record.slug == slug)

    @property
    def cells(self) -> list[tuple[EnvironmentRecord, AgentRecord]]:
        """Every environment with every agent."""
        return [(environment, agent) for environment in self.environments for agent in self.agents]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry:
    """A task of a fixed list."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    task: int
    """Its index in the environment."""
    task_id: str
    sha256: str
    """Hash of its content: question, answers and whatever else defines it."""
    labels: Labels
    """What results are broken down by: ``type``, ``hops``, ``level``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUsage:
    """What an episode cost, all attempts together."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    calls: int
    prompt_tokens: int
    completion_tokens: int
    money: float | None
    """By the agent's prices; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """One episode."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    environment: str
    """Slug."""
    agent: str
    """Slug."""
    task: int
    task_id: str
    task_sha256: str
    sample: int
    """Which of the task's samples, from 0."""
    seed: int
    """Of environment and agent; given by the protocol."""
    actions: list[InstanceOf[str]]
    """What the agent wrote, turn by turn: enough to play the episode again."""
    rewards: list[float]
    reward_terms: list[dict[str, float]]
    errors: list[str | None]
    """Code of the mistake of each step, such as ``bad_json``."""
    metrics: dict[str, float]
    return_: float
    """Sum of the rewards; ``return`` in the file."""
    success: bool
    stop_reason: StopReason
    error: InstanceOf[str] | None
    """An infrastructure fault that outlived its retries: the episode is not scored."""
    attempts: list[list[InstanceOf[str]]]
    """Actions of other attempts, which cost but do not count."""
    usage: LineUsage
    labels: Labels

    @property
    def is_scored(self) -> bool:
        """Whether the episode says anything about the agent."""
        return self.error is None


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest's file."""
    return json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"


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


def parse_line(text: str, place: str) -> ResultLine:
    """Read a result line.

    Args:
        text: The line, without its end.
        place: File and line number, for the message.

    Raises:
        DataError: If it is malformed, or not in the form in which `write_line` writes it.
    """
    record = _json(text, place)
    if not isinstance(record, dict):
        raise DataError(f"{place}: is no JSON object.")
    fields = {("return_" if key == "return" else key): value for key, value in record.items()}
    line: ResultLine = _validated(ResultLine, fields, place)
    if write_line(line_record(line)) != text + "\n":
        raise DataError(f"{place}: is not in the form in which results are written.")
    return line


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder."""

    path: Path

    @property
    def manifest_path(self) -> Path:
        """The manifest."""
        return self.path / "manifest.json"

    @property
    def checksums_path(self) -> Path:
        """The checksums."""
        return self.path / "checksums.json"

    def tasks_path(self, environment: str) -> Path:
        """The list of tasks of an environment."""
        return self.path / "tasks" / f"{environment}.json"

    def results_path(self, environment: str, agent: str) -> Path:
        """The results of an agent in an environment."""
        return self.path / "results" / environment / f"{agent}.jsonl"

    def seconds_path(self, environment: str, agent: str) -> Path:
        """The seconds that each episode of `results_path` took."""
        return self.path / "seconds" / environment / f"{agent}.jsonl"

    def read_manifest(self) -> Manifest:
        """Read the manifest.

        Raises:
            DataError: If it is missing, malformed or of another version.
        """
        path = self.manifest_path
        record = _json(_text(path), str(path))
        version = record.get("format_version") if isinstance(record, dict) else None
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path}: field 'format_version' is {version!r}; this program reads "
                f"{FORMAT_VERSION}. Use the version of agent-r1 that made the run."
            )
        manifest: Manifest = _validated(Manifest, record, str(path))
        _check_protocol(manifest.protocol, path)
        _check_names(manifest, path)
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest."""
        write_text(self.manifest_path, manifest_text(manifest))

    def read_tasks(self, environment: str) -> list[TaskEntry]:
        """Read the fixed list of tasks of an environment.

        Raises:
            DataError: If it is missing or malformed.
        """
        path = self.tasks_path(environment)
        entries: list[TaskEntry] = _validated(
            list[TaskEntry], _json(_text(path), str(path)), str(path)
        )
        return entries

    def write_tasks(self, environment: str, entries: Sequence[TaskEntry]) -> None:
        """Write the fixed list of tasks of an environment."""
        write_text(self.tasks_path(environment), tasks_text(entries))

    def read_results(self, environment: str, agent: str) -> list[ResultLine]:
        """Read the results of an agent in an environment.

        Raises:
            DataError: If a line is malformed; names file and line.
        """
        path = self.results_path(environment, agent)
        return [parse_line(text, f"{path}, line {number}") for number, text in read_lines(path)]

    def read_seconds(self, environment: str, agent: str) -> list[float]:
        """Read the seconds of each episode, in the order of the results; empty if not at hand.

        Raises:
            DataError: If a line is malformed; names file and line.
        """
        path = self.seconds_path(environment, agent)
        if not path.exists():
            return []
        seconds = []
        for number, text in read_lines(path):
            place = f"{path}, line {number}"
            line: SecondsLine = _validated(SecondsLine, _json(text, place), place)
            seconds.append(line.seconds)
        return seconds

    def expected_files(self, manifest: Manifest) -> list[str]:
        """Return the paths that `checksums.json` covers, sorted."""
        paths = [self.manifest_path]
        paths += [self.tasks_path(environment.slug) for environment in manifest.environments]
        paths += [self.results_path(e.slug, a.slug) for e, a in manifest.cells]
        return sorted(path.relative_to(self.path).as_posix() for path in paths)

    def write_checksums(self, manifest: Manifest) -> None:
        """Seal a run that is complete."""
        names = self.expected_files(manifest)
        write_json(self.checksums_path, {name: file_sha256(self.path / name) for name in names})

    def read_checksums(self) -> dict[str, str]:
        """Read the checksums.

        Raises:
            DataError: If they are missing (the run is not complete) or malformed.
        """
        path = self.checksums_path
        if not path.exists():
            raise DataError(
                f"{path}: is missing: the run is not complete. Give the command that began it once "
                "more; it goes on."
            )
        checksums: dict[str, str] = _validated(dict[str, str], _json(_text(path), str(path)), path)
        return checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsLine:
    """How long an episode took."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT
    task: int
    sample: int
    seconds: float


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of a file with its number, from 1.

    Raises:
        DataError: If the file cannot be read, or its last line is not whole.
    """
    *lines, rest = _text(path).split("\n")
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


def is_slug(text: str) -> bool:
    """Return whether `text` may name an agent or an environment, and so a file."""
    return re.fullmatch(_SLUG, text) is not None


def make_slug(name: str) -> str:
    """Return the file name of what is called `name`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]


def _check_protocol(protocol: Protocol, path: Path) -> None:
    least = {"samples_per_task": 1, "temperature": 0, "seed": 0, "max_retries": 0, "concurrency": 1}
    for name, limit in least.items():
        if getattr(protocol, name) < limit:
            raise DataError(f"{path}: field 'protocol.{name}' must be at least {limit}.")


def _check_names(manifest: Manifest, path: Path) -> None:
    """Refuse names that are no file names, or stand for two things."""
    for kind, slugs in (
        ("environments", [record.slug for record in manifest.environments]),
        ("agents", [record.slug for record in manifest.agents]),
    ):
        for slug in slugs:
            if not is_slug(slug):
                raise DataError(f"{path}: {kind}: slug {slug!r} is no plain name.")
            if slugs.count(slug) > 1:
                raise DataError(f"{path}: {kind}: there are two of the slug {slug!r}.")
    for record in manifest.environments:
        if record.tasks_path != f"tasks/{record.slug}.json":
            raise DataError(f"{path}: environment {record.slug}: field 'tasks_path' is wrong.")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error.reason}).") from None


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not valid JSON ({error}).") from None


def _validated(kind: Any, value: Any, place: str | Path) -> Any:
    try:
        return _adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]).replace("return_", "return")
        raise DataError(f"{place}: field {name!r}: {first['msg']}.") from None


@functools.cache
def _adapter(kind: Any) -> Any:
    return pydantic.TypeAdapter(kind)
