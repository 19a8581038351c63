"""The configuration of a run: YAML files, merged.

A file has the sections ``protocol`` (fields of `Protocol`), ``environments``, ``agents`` and
``left_out`` (lists). Several files add up; later protocol values win. ``board`` names a preset from
which everything but the agents is taken.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import gymnasium as gym
import pydantic
from pydantic import Field

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import find_kind, is_custom
from agent_leaderboard.records.manifest import LeftOut, Prices, Protocol, make_slug
from agent_leaderboard.records.names import look_alikes, unclear_names
from agent_leaderboard.records.reading import first_problem, type_adapter
from agent_trainers.cli.arguments import read_config

FOLDER: Final = Path(__file__).parent.parent
PRESETS: Final[Mapping[str, Path]] = {
    "published": FOLDER / "configs" / "published.yaml",
    "smollm2": FOLDER / "configs" / "smollm2.yaml",
    "paper": FOLDER / "presets" / "paper.yaml",
}
DATA_PLACEHOLDER: Final = "${data}"
EMBEDDED: Final = "embedded"
"""Name of the model that comes with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """An environment to run."""

    id: str
    """Gymnasium id."""
    name: str = ""
    """Display name; derived from the id by default."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments; ``${data}`` is the data folder."""
    tasks: Annotated[int, Field(ge=1)] = 100
    """Number of tasks: drawn by the protocol's seed, or the first ones of a generated family."""
    contamination: str
    """Whether models may have seen the tasks."""
    optional: bool = False
    """Leave the environment out, with the reason, if its extra or its data are missing."""
    attack: str | None = None
    """Attack on what the agent reads."""
    attack_on: str | None = None
    """Slug of the environment with the same tasks without the attack."""

    @property
    def slug(self) -> str:
        """Name in files."""
        return make_slug(self.name or re.sub(r"^.*/|-v\d+$", "", self.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """An agent to run."""

    name: str
    kind: str
    """Key of `AGENTS`, or the import path of a custom agent."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the kind; ``model`` is a name, a folder, or ``embedded``."""
    train: dict[str, Any] | None = None
    """Options of ``agent-r1-train`` with which the run trains the model itself, once."""
    prices: Prices | None = None
    model: str | None = None
    """Model name on the board; by default that of the settings, or of its folder."""
    made_by: str | None = None
    """Commands that make the model, if its name does not identify it."""
    organisation: str | None = None
    url: str | None = None
    licence: str | None = None
    """Licence of code and model."""

    @property
    def slug(self) -> str:
        """Name in files."""
        return make_slug(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A run to do."""

    protocol: Protocol
    environments: tuple[EnvironmentConfig, ...]
    agents: tuple[AgentConfig, ...]
    left_out: tuple[LeftOut, ...] = ()

    def choose(
        self,
        *,
        environments: Sequence[str] = (),
        agents: Sequence[str] = (),
        tasks: int | None = None,
    ) -> "RunConfig":
        """Return a part of the run: slugs (all if empty), at most `tasks` of each environment."""
        chosen = _chosen(self.environments, environments, "environment of the run")
        if tasks is not None:
            chosen = tuple(replace(config, tasks=min(config.tasks, tasks)) for config in chosen)
        return replace(
            self, environments=chosen, agents=_chosen(self.agents, agents, "agent of the run")
        )

    def override_models(self, settings: Mapping[str, Any]) -> "RunConfig":
        """Return the run with these settings for all model agents that it does not train."""
        agents = (
            replace(config, settings={**config.settings, **settings})
            if find_kind(config.kind).needs_model and config.train is None
            else config
            for config in self.agents
        )
        return replace(self, agents=tuple(agents))


_LISTS: Final[Mapping[str, type]] = {
    "environments": EnvironmentConfig,
    "agents": AgentConfig,
    "left_out": LeftOut,
}


def load_configs(paths: Sequence[Path], **protocol: Any) -> RunConfig:
    """Read YAML files and merge them; `protocol` overrides fields of their protocols."""
    merged: dict[str, Any] = {"protocol": {}} | {section: [] for section in _LISTS}
    for path, config in _with_boards(paths):
        for name in config:
            lookup(merged, name, kind=f"key in {path}:")
        for section, kind in _LISTS.items():
            entries = config.get(section) or []
            if not isinstance(entries, list):
                raise ConfigurationError(f"{path}: {section!r} must be a list.")
            merged[section] += [
                _entry(kind, entry, f"{path}, {section}, entry {number}")
                for number, entry in enumerate(entries, start=1)
            ]
        merged["protocol"] |= config.get("protocol") or {}
    where = ", ".join(map(str, paths))
    run = RunConfig(
        protocol=_entry(Protocol, merged.pop("protocol") | protocol, f"{where}, protocol"),
        **{section: tuple(entries) for section, entries in merged.items()},
    )
    _check(run, where)
    return run


def _with_boards(paths: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each file, preceded by the one of its board."""
    for path in paths:
        config = read_config(path)
        if (name := config.pop("board", None)) is not None:
            board = lookup(PRESETS, str(name), kind="board")
            shared = {k: v for k, v in read_config(board).items() if k != "agents"}
            entries = shared.get("environments") or []
            shared["environments"] = [entry | {"optional": True} for entry in entries]
            yield board, shared
        yield path, config


def fill_in(value: Any, data: Path | None) -> Any:
    """Replace ``${data}`` by the data folder in nested JSON; refuse other placeholders."""
    if isinstance(value, Mapping):
        return {key: fill_in(item, data) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill_in(item, data) for item in value]
    for placeholder in re.findall(r"\$\{[^}]*\}", value) if isinstance(value, str) else ():
        lookup({DATA_PLACEHOLDER: None}, placeholder, kind="placeholder")
        if data is None:
            raise ConfigurationError(
                f"{value}: pass --data with the folder of the data, or set AGENT_R1_DATA."
            )
        value = value.replace(placeholder, str(data))
    return value


def _chosen(configs: tuple[Any, ...], slugs: Sequence[str], kind: str) -> tuple[Any, ...]:
    by_slug = {config.slug: config for config in configs}
    return tuple(lookup(by_slug, slug, kind=kind) for slug in slugs) or configs


def _entry(kind: Any, entry: Any, place: str) -> Any:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(f"{place}: must consist of 'key: value' lines, not {entry!r}.")
    for name in entry:
        known = {field.name: None for field in dataclasses.fields(kind)}
        lookup(known, str(name), kind=f"key in {place}:")
    try:
        return type_adapter(kind).validate_python(entry)
    except pydantic.ValidationError as error:
        problem = ": ".join(filter(None, first_problem(error)))
        raise ConfigurationError(f"{place}: {problem}.") from None


def _check(run: RunConfig, where: str) -> None:
    def problems() -> Iterator[str]:
        if not run.environments or not run.agents:
            yield "a run needs 'environments' and 'agents'"
        for agent in run.agents:
            yield from (f"agent {agent.name!r}, {text}" for text in _check_agent(agent))
        for configs in (run.environments, run.agents):
            slugs = [config.slug for config in configs]
            for slug in slugs:
                if not slug or slugs.count(slug) > 1:
                    yield f"the name {slug!r} is repeated, or has no letter"
        yield from look_alikes(run.agents)

    for text in problems():
        raise ConfigurationError(f"{where}: {text}.")
    plain = {config.slug: None for config in run.environments if config.attack_on is None}
    for environment in run.environments:
        lookup(gym.registry, environment.id, kind="environment")
        if environment.attack_on is not None:
            kind = f"environment attacked by {environment.slug}"
            lookup(plain, environment.attack_on, kind=kind)


def _check_agent(agent: AgentConfig) -> Iterator[str]:
    kind = find_kind(agent.kind)
    yield from unclear_names(agent)
    has_prices = agent.prices is not None and not is_custom(agent.kind)
    if not kind.needs_model and (agent.train is not None or has_prices):
        yield f"{agent.kind!r} has no model. Leave out 'train' and 'prices'"
    if agent.train is not None and "model" in agent.settings:
        yield "give 'train' or 'model', not both"
