"""The manifest of a run, and that of the published run."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from agent_envs.errors import DataError
from agent_leaderboard.records.reading import Record, parse_json, read_text, validated

FORMAT_VERSION: Final = 4
"""4: results in one Parquet file; text on licensed tasks encrypted with AES-SIV."""
PUBLISHED: Final = Path(__file__).parent.parent / "references" / "published.json"
"""Manifest of the published run: what ``own measure`` and taken names are compared with."""
MEASURED_FIELDS: Final = ("seed", "samples_per_task", "temperature", "max_retries")
"""Protocol fields that change scores; the others change speed."""
ORIGIN: Final = ("date", "commit")
"""Fields of an agent that differ between runs of the same agent."""
HIDDEN_SEEDS: Final = 2**32
"""Smallest seed of a hidden split: it draws tasks of generated families, too."""


def make_slug(name: str) -> str:
    """Derive the slug of a name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]


Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]


def _day(text: str) -> str:
    """Check the form YYYY-MM-DD."""
    if date.fromisoformat(text).isoformat() != text:
        raise ValueError("must have the form YYYY-MM-DD")
    return text


Text = Annotated[str, Field(max_length=2_000)]
"""Names and reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol(Record):
    """How every agent is measured."""

    samples_per_task: Annotated[int, Field(ge=1, le=1_000)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Sampling temperature of model agents, unless their settings override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the task selection and of every episode."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Retries of an episode after an infrastructure failure, never after a wrong answer."""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Episodes at once."""

    @property
    def is_hidden(self) -> bool:
        """Whether the tasks are those of a hidden split."""
        return self.seed >= HIDDEN_SEEDS


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile(Record):
    """A data file of an environment."""

    name: str
    """Path below the data folder."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord(Record):
    """An environment of a run."""

    slug: Slug
    id: str
    """Gymnasium id, with the environment's version."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments; ``${data}`` is the data folder."""
    max_turns: int | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Weight of each active reward term."""
    outcome_terms: list[str] = field(default_factory=list)
    """Reward terms of the outcome, as opposed to the process."""
    num_tasks: Annotated[int, Field(ge=1)]
    tasks_sha256: str = ""
    """Digest of the task list."""
    data: list[DataFile] = field(default_factory=list)
    contamination: Text
    """Whether models may have seen the tasks."""
    is_text_public: bool = False
    """Whether questions and observations may be published: true of generated tasks."""
    attack: str | None = None
    """Attack on what the agent reads, such as ``edits``."""
    attack_on: Slug | None = None
    """Environment with the same tasks without the attack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(Record):
    """Prices of a million tokens."""

    prompt: Annotated[float, Field(ge=0)]
    completion: Annotated[float, Field(ge=0)]
    currency: str = "USD"

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of these tokens."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord(Record):
    """An agent of a run."""

    slug: Slug
    name: Text
    kind: str
    """Key of `agent_leaderboard.agents.agent.AGENTS`, or an import path."""
    model: Text | None = None
    made_by: Text | None = None
    """Commands that make the model, if its name does not identify it."""
    weights_sha256: dict[str, str] = field(default_factory=dict)
    """Digest of each weights file of a local model."""
    tool_format: str | None = None
    """Tool format of its actions; None for the environment's default."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings without the model."""
    train: dict[str, Any] | None = None
    """Arguments of ``agent-r1-train`` if the run trained the model."""
    prices: Prices | None = None
    organisation: Text | None = None
    url: Text | None = None
    licence: Text | None = None
    """Licence of code and model."""
    packages: dict[str, str]
    """Package versions."""
    date: Annotated[str, AfterValidator(_day)] | None = None
    """Day on which its run began."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Commit of the checkout that ran it."""
    not_played: list[str] = field(default_factory=list)
    """Environments of the run in which the agent did not play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Record):
    """An environment that was not run."""

    id: Text
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """Protocol, environments and agents of a run."""

    format_version: int
    protocol: Protocol
    environments: list[EnvironmentRecord]
    agents: list[AgentRecord]
    left_out: list[LeftOut]

    def __post_init__(self) -> None:
        """Refuse repeated slugs."""
        for records in (self.environments, self.agents):
            if len({record.slug for record in records}) < len(records):
                raise ValueError("a slug is repeated")

    def environment(self, slug: str) -> EnvironmentRecord:
        """Return the environment with this slug."""
        return next(record for record in self.environments if record.slug == slug)

    def agent(self, slug: str) -> AgentRecord:
        """Return the agent with this slug."""
        return next(record for record in self.agents if record.slug == slug)

    @property
    def cells(self) -> list[tuple[EnvironmentRecord, AgentRecord]]:
        """Every environment with every agent that ran on it."""
        return [
            (environment, agent)
            for environment in self.environments
            for agent in self.agents
            if environment.slug not in agent.not_played
        ]

    def measure_changes(self, protocol: Protocol, environment: EnvironmentRecord) -> list[str]:
        """Return how an environment is measured otherwise than in this run."""
        for one in self.environments:
            if one.slug == environment.slug:
                changes = differences(protocol, self.protocol, MEASURED_FIELDS)
                return [*changes, *differences(environment, one)]
        return ["the published run has no such environment"]


def read_manifest(path: Path) -> Manifest:
    """Read a manifest of `FORMAT_VERSION`."""
    record = parse_json(read_text(path), path)
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: field 'format_version' is {version!r}; this version reads {FORMAT_VERSION}."
        )
    manifest: Manifest = validated(Manifest, record, path)
    return manifest


def differences(record: object, other: Any, names: Iterable[str] = ()) -> Iterator[str]:
    """Yield the fields in which two records differ, as JSON: -0.0 is not 0.0."""
    for name in names or [entry.name for entry in dataclasses.fields(other)]:
        mine, expected = (
            json.dumps(getattr(one, name), sort_keys=True, default=dataclasses.asdict)
            for one in (record, other)
        )
        if mine != expected:
            yield f"field {name.rstrip('_')!r}: is {mine[:200]}, not {expected[:200]}"


def to_json(record: Any) -> str:
    """Return the content of a record's file; `ORIGIN` is left out where it is unknown."""
    content = dataclasses.asdict(record)
    for agent in content.get("agents", ()):
        for name in ORIGIN:
            if agent[name] is None:
                del agent[name]
    return json.dumps(content, indent=2) + "\n"


@functools.cache
def published() -> Manifest:
    """Return the manifest of the published run."""
    return read_manifest(PUBLISHED)
