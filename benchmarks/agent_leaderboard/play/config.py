"""What a run of the leaderboard is to do: YAML files, merged.

A file holds ``protocol`` (the fields of `Protocol`), ``environments``, ``agents`` and ``left_out``
(lists); files that are given together add up, and later values of the protocol win. ``board`` names
a preset of which a file takes all but the agents: it enters agents of its own on that board. A key
or a name that is unknown is an error that holds the nearest right one.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import gymnasium as gym
import pydantic
from pydantic import Field

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import find_kind, import_path, is_own
from agent_leaderboard.records.manifest import LeftOut, Prices, Protocol, is_slug, make_slug
from agent_leaderboard.records.names import look_alikes, unclear_names
from agent_leaderboard.records.reading import first_problem, type_adapter
from agent_trainers.cli.arguments import read_config

FOLDER: Final = Path(__file__).parent.parent
PRESETS: Final[Mapping[str, Path]] = {
    "published": FOLDER / "configs" / "published.yaml",
    "smollm2": FOLDER / "configs" / "smollm2.yaml",
    "paper": FOLDER / "presets" / "paper.yaml",
}
"""Settings that come with the package, by name."""
DATA_PLACEHOLDER: Final = "${data}"
EMBEDDED: Final = "embedded"
"""The model that comes with the package."""
_PLACEHOLDER: Final = re.compile(r"\$\{[^}]*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """An environment to run."""

    id: str
    """Gymnasium's id."""
    name: str = ""
    """What it is called; made of the id if not given."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its arguments; ``${data}`` stands for the data folder."""
    tasks: Annotated[int, Field(ge=1)] = 100
    """How many: drawn by the protocol's seed, or the first ones where tasks are endless."""
    contamination: str
    """Whether models may have seen the tasks."""
    optional: bool = False
    """Whether it is left out, with the reason, where its extra or its data are not at hand."""
    attack: str | None = None
    """What is done to what the agent is shown; for the page."""
    attack_on: str | None = None
    """The slug of the environment of the same tasks without the attack."""

    @property
    def slug(self) -> str:
        """Its name in file names."""
        return make_slug(self.name or re.sub(r"^.*/|-v\d+$", "", self.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """An agent to run."""

    name: str
    kind: str | Callable[..., Any]
    """A key of `AGENTS`, or an agent of one's own: what makes it, or its import path."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What its kind takes; ``model`` is a name, a folder, or ``embedded``."""
    train: dict[str, Any] | None = None
    """Options of ``agent-r1-train``: the run trains the model itself, once."""
    prices: Prices | None = None
    """Of the model's tokens."""
    model: str | None = None
    """The model's name on the board; that of the settings, or of its folder, if not given."""
    made_by: str | None = None
    """How to make the model where it cannot be had by its name: the commands."""
    organisation: str | None = None
    """Who enters it."""
    url: str | None = None
    """Where more is said about it."""
    licence: str | None = None
    """Of its code and model."""

    @property
    def slug(self) -> str:
        """Its name in file names."""
        return make_slug(self.name)

    @property
    def kind_name(self) -> str:
        """Its kind as results name it."""
        return self.kind if isinstance(self.kind, str) else import_path(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run is to do."""

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
        """Return a part of the run: slugs (all if empty), at most `tasks` of each environment.

        Raises:
            UnknownNameError: If the run has no environment or agent of a name.
        """
        chosen = _chosen(self.environments, environments, "environment of the run")
        if tasks is not None:
            chosen = tuple(replace(config, tasks=min(config.tasks, tasks)) for config in chosen)
        players = _chosen(self.agents, agents, "agent of the run")
        return replace(self, environments=chosen, agents=players)

    def override_models(self, settings: Mapping[str, Any]) -> "RunConfig":
        """Return the run with these settings for every agent on a model that it does not train."""
        return replace(
            self,
            agents=tuple(
                replace(config, settings={**config.settings, **settings})
                if find_kind(config.kind_name).needs_model and config.train is None
                else config
                for config in self.agents
            ),
        )


def load_configs(paths: Sequence[Path], **protocol: Any) -> RunConfig:
    """Read YAML files and merge them; fields of the `protocol` that are given here win.

    Raises:
        UnknownNameError: If a key, an environment, or a kind of agent is unknown.
        ConfigurationError: If a value is wrong, or two things have the same name.
    """
    merged: dict[str, Any] = {"protocol": {}} | {section: [] for section in _SECTIONS}
    for path, config in _with_boards(paths):
        _check_keys(config, merged, str(path))
        for section, kind in _SECTIONS.items():
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
    """Yield each file, and the one of its board before it."""
    for path in paths:
        config = read_config(path)
        if (name := config.pop("board", None)) is not None:
            board = lookup(PRESETS, str(name), kind="board")
            of_board = {k: v for k, v in read_config(board).items() if k != "agents"}
            entries = of_board.get("environments") or []
            of_board["environments"] = [entry | {"optional": True} for entry in entries]
            yield board, of_board
        yield path, config


def texts_in(value: Any) -> list[str]:
    """Return every string in nested JSON."""
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in texts_in(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in texts_in(item)]
    return [value] if isinstance(value, str) else []


def fill_in(value: Any, data: Path | None) -> Any:
    """Return nested JSON with ``${data}`` replaced by the data folder.

    Raises:
        ConfigurationError: If there is no data folder, or another placeholder.
    """
    if isinstance(value, Mapping):
        return {key: fill_in(item, data) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill_in(item, data) for item in value]
    if not isinstance(value, str):
        return value
    for placeholder in _PLACEHOLDER.findall(value):
        lookup({DATA_PLACEHOLDER: None}, placeholder, kind="placeholder")
        if data is None:
            raise ConfigurationError(
                f"{value}: pass --data with the folder of the data, or set AGENT_R1_DATA."
            )
        value = value.replace(placeholder, str(data))
    return value


_SECTIONS: Final[Mapping[str, type]] = {
    "environments": EnvironmentConfig,
    "agents": AgentConfig,
    "left_out": LeftOut,
}


def _chosen(configs: tuple[Any, ...], slugs: Sequence[str], kind: str) -> tuple[Any, ...]:
    by_slug = {config.slug: config for config in configs}
    return tuple(lookup(by_slug, slug, kind=kind) for slug in slugs) or configs


def _check_keys(entry: Any, known: Mapping[str, object], place: str) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(f"{place}: must hold 'key: value' lines, not {entry!r}.")
    for key in entry:
        lookup(known, str(key), kind=f"key in {place}:")


def _entry(kind: Any, entry: Any, place: str) -> Any:
    _check_keys(entry, {field.name: None for field in dataclasses.fields(kind)}, place)
    try:
        return type_adapter(kind).validate_python(entry)
    except pydantic.ValidationError as error:
        problem = ": ".join(filter(None, first_problem(error)))
        raise ConfigurationError(f"{place}: {problem}.") from None


def _check(run: RunConfig, where: str) -> None:
    if not run.environments or not run.agents:
        raise ConfigurationError(f"{where}: a run needs 'environments' and 'agents'.")
    for environment in run.environments:
        lookup(gym.registry, environment.id, kind="environment")
    for agent in run.agents:
        _check_agent(agent, where)
    _check_slugs([config.slug for config in run.environments], where)
    plain = {config.slug: None for config in run.environments if config.attack_on is None}
    for environment in run.environments:
        if environment.attack_on is not None:
            lookup(
                plain, environment.attack_on, kind=f"environment that {environment.slug} attacks"
            )
    _check_slugs([config.slug for config in run.agents], where)
    for text in look_alikes(run.agents):
        raise ConfigurationError(f"{where}: {text}.")


def _check_slugs(slugs: Sequence[str], where: str) -> None:
    for slug in slugs:
        if not is_slug(slug) or slugs.count(slug) > 1:
            raise ConfigurationError(
                f"{where}: {slug!r} is used twice, or is no name. Give each a 'name' of "
                "its own, of letters and digits."
            )


def _check_agent(agent: AgentConfig, where: str) -> None:
    place, kind = f"{where}: agent {agent.name!r}", find_kind(agent.kind_name)
    for text in unclear_names(agent):
        raise ConfigurationError(f"{place}, {text}.")
    has_prices = agent.prices is not None and not is_own(agent.kind_name)
    if not kind.needs_model and (agent.train is not None or has_prices):
        raise ConfigurationError(
            f"{place}: {agent.kind_name!r} has no model to train or to pay for. Leave out 'train' "
            "and 'prices'."
        )
    if agent.train is not None and "model" in agent.settings:
        raise ConfigurationError(f"{place}: 'train' makes the model: give it or 'model', not both.")
