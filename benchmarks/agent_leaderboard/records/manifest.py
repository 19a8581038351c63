"""The manifest of a run: how it measures, in which environments, and whom."""

import dataclasses
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from agent_envs.errors import DataError
from agent_leaderboard.records.reading import Record

FORMAT_VERSION: Final = 3
"""3: what is written about licensed tasks is sealed for its place, an episode at a time."""


def is_slug(text: str) -> bool:
    """Return whether `text` may name an agent or an environment, and so a file."""
    return re.fullmatch(r"^[a-z0-9][a-z0-9._-]{0,79}$", text) is not None


def make_slug(name: str) -> str:
    """Return the file name of what is called `name`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]


def _check_slug(text: str) -> str:
    if not is_slug(text):
        raise ValueError(f"slug {text!r} is no plain name")
    return text


Slug = Annotated[str, AfterValidator(_check_slug)]
Text = Annotated[str, Field(max_length=2_000)]
"""What people read; longer text is no name and no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol(Record):
    """How every agent is measured."""

    samples_per_task: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Episodes of each task."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Sampling temperature of the agents on a model, unless their settings say otherwise."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """What every episode's seed is derived from, and which tasks are drawn."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 2
    """How often an episode is played again after an infrastructure fault, never a wrong answer."""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Episodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile(Record):
    """A file that tasks or passages come from."""

    name: str
    """Its path below the data folder."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord(Record):
    """An environment of a run."""

    slug: Slug
    """Its name in the run, and in file names."""
    id: str
    """Gymnasium's id; ends with the environment's version."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments; ``${data}`` stands for the data folder."""
    max_turns: int | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Weight of each reward term that is on."""
    outcome_terms: list[str] = field(default_factory=list)
    """Which of them reward the outcome; the others reward the way."""
    num_tasks: int
    tasks_path: str
    tasks_sha256: str
    """Of the task list."""
    data: list[DataFile] = field(default_factory=list)
    contamination: Text
    """Whether models may have seen the tasks."""
    is_text_public: bool
    """Whether questions and observations may be published: true of generated tasks."""
    attack: str | None = None
    """What is done to what the agent is shown, such as ``edits``; None for nothing."""
    attack_on: Slug | None = None
    """The environment of the same tasks without the attack."""

    def __post_init__(self) -> None:
        """Refuse a task list in another place."""
        if self.tasks_path != f"tasks/{self.slug}.json":
            raise ValueError(f"'tasks_path' of {self.slug!r} is wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(Record):
    """What a model's tokens cost."""

    prompt: Annotated[float, Field(ge=0)]
    """Of a million prompt tokens."""
    completion: Annotated[float, Field(ge=0)]
    """Of a million completion tokens."""
    currency: str = "USD"

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return what these tokens cost."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord(Record):
    """An agent of a run."""

    slug: Slug
    """Its name in file names."""
    name: Text
    """Its name in tables."""
    kind: str
    """A key of `agent_leaderboard.agents.agent.AGENTS`."""
    model: Text | None = None
    """The model's name; None where there is no model."""
    made_by: Text | None = None
    """How to make the model, where it cannot be had by its name."""
    weights_sha256: dict[str, str] = field(default_factory=dict)
    """Of the weights files of a local model, by name."""
    tool_format: str | None = None
    """The tool format it acts in; None for the environment's own."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its settings, without the model."""
    train: dict[str, Any] | None = None
    """Arguments of ``agent-r1-train``, where the run trained the model itself."""
    prices: Prices | None = None
    organisation: Text | None = None
    """Who entered it."""
    url: Text | None = None
    """Where more is said about it: its code, a paper."""
    licence: Text | None = None
    """The licence of its code and model."""
    packages: dict[str, str]
    """Versions it was run with."""
    not_played: list[str] = field(default_factory=list)
    """Environments of the run that it did not play: runs of several people were joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Record):
    """An environment that was not run."""

    id: Text
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """What a run consists of."""

    format_version: int
    protocol: Protocol
    environments: list[EnvironmentRecord]
    agents: list[AgentRecord]
    left_out: list[LeftOut]

    def __post_init__(self) -> None:
        """Refuse a name that stands for two things."""
        for kind, records in (("environments", self.environments), ("agents", self.agents)):
            slugs = [record.slug for record in records]
            if twice := [slug for slug, count in Counter(slugs).items() if count > 1]:
                raise ValueError(f"{kind}: there are two of the slug {twice[0]!r}")

    def environment(self, slug: str) -> EnvironmentRecord:
        """Return the environment of that name."""
        return next(record for record in self.environments if record.slug == slug)

    def agent(self, slug: str) -> AgentRecord:
        """Return the agent of that name."""
        return next(record for record in self.agents if record.slug == slug)

    @property
    def cells(self) -> list[tuple[EnvironmentRecord, AgentRecord]]:
        """Every environment with every agent that played it."""
        return [
            (environment, agent)
            for environment in self.environments
            for agent in self.agents
            if environment.slug not in agent.not_played
        ]


def check_version(record: Any, path: Path) -> None:
    """Refuse JSON of a format that is not this program's.

    Raises:
        DataError: Names the file, its version, and what to do.
    """
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        older = isinstance(version, int) and version < FORMAT_VERSION
        advice = (
            "In older ones equal answers are sealed equally, so they can be told apart: run it anew"
            if older
            else "Use the version of agent-r1 that wrote it"
        )
        raise DataError(
            f"{path}: field 'format_version' is {version!r}; this program reads {FORMAT_VERSION}. "
            f"{advice}."
        )


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest's file."""
    return json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
