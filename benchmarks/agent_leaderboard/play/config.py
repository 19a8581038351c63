"""The configuration of a run: YAML files, merged.

A file has the sections ``protocol`` (fields of `Protocol`), ``environments``, ``agents`` and
``left_out`` (lists). Several files add up; later protocol values win. ``board`` names a preset from
which everything but the agents is taken; environments that it leaves out can be added. Entries
become records of the manifest; `prepare` completes them.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import pydantic

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import find_kind, is_custom
from agent_leaderboard.records.manifest import (
    HIDDEN_SEEDS,
    AgentRecord,
    EnvironmentRecord,
    LeftOut,
    Protocol,
    make_slug,
)
from agent_leaderboard.records.names import misleading_names
from agent_leaderboard.records.reading import first_problem, type_adapter
from agent_trainers.cli.config_files import read_config

FOLDER: Final = Path(__file__).parent.parent
PRESETS: Final[Mapping[str, Path]] = {
    "published": FOLDER / "configs" / "published.yaml",
    "injection": FOLDER / "configs" / "injection.yaml",
    "smollm2": FOLDER / "configs" / "smollm2.yaml",
    "paper": FOLDER / "presets" / "paper.yaml",
}
KEYS: Final[Mapping[str, Sequence[str]]] = {
    "protocol": [entry.name for entry in fields(Protocol)],
    "environments": ["id", "name", "kwargs", "tasks", "contamination", "optional", "attack",
                     "attack_on"],
    "agents": ["name", "kind", "settings", "prices", "model", "made_by", "organisation",
               "url", "licence", "not_played"],
    "left_out": ["id", "reason"],
}  # fmt: skip
"""Keys of a file, and of an entry of each."""
DEFAULT_TASKS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A run to do."""

    protocol: Protocol
    environments: tuple[EnvironmentRecord, ...]
    """``num_tasks`` is the largest number: drawn by the protocol's seed, or the first ones of a
    generated family."""
    agents: tuple[AgentRecord, ...]
    """``settings`` are complete; ``model`` in them is a name, a folder, or ``embedded``."""
    left_out: tuple[LeftOut, ...] = ()
    optional: frozenset[str] = frozenset()
    """Slugs of environments to leave out, with the reason, if their extra, data or sandbox are
    missing."""

    def choose(
        self,
        *,
        environments: Sequence[str] = (),
        agents: Sequence[str] = (),
        tasks: int | None = None,
    ) -> "RunConfig":
        """Return a part of the run: slugs (all if empty), at most `tasks` of each environment."""

        def chosen(records: Sequence[Any], slugs: Sequence[str], kind: str) -> tuple[Any, ...]:
            by_slug = {record.slug: record for record in records}
            return tuple(
                lookup(by_slug, slug, kind=kind) for slug in dict.fromkeys(slugs) or by_slug
            )

        kept = chosen(self.environments, environments, "environment of the run")
        if tasks is not None:
            kept = tuple(replace(one, num_tasks=min(one.num_tasks, tasks)) for one in kept)
        return replace(
            self, environments=kept, agents=chosen(self.agents, agents, "agent of the run")
        )

    def hide(self, path: Path) -> "RunConfig":
        """Return the run on the hidden split of the seed in a file; a new file gets a new seed."""
        if not path.exists():
            write_text(path, f"{HIDDEN_SEEDS + secrets.randbits(62)}\n")
            path.chmod(0o600)
        text = path.read_text(encoding="utf-8").strip()
        is_number = text.isascii() and text.isdecimal() and len(text) < 20
        if not is_number or not HIDDEN_SEEDS <= int(text) < 2**63:
            raise ConfigurationError(
                f"{path}: must hold an integer of at least {HIDDEN_SEEDS}, and less than 2**63."
            )
        return replace(self, protocol=replace(self.protocol, seed=int(text)))

    def override_models(self, settings: Mapping[str, Any]) -> "RunConfig":
        """Return the run with these settings for all model agents, and no other model's name."""
        names: dict[str, Any] = {"model": None, "made_by": None} if "model" in settings else {}
        agents = (
            replace(agent, settings={**agent.settings, **settings}, **names)
            if find_kind(agent.kind).needs_model
            else agent
            for agent in self.agents
        )
        return replace(self, agents=tuple(agents))


def load_configs(paths: Sequence[Path]) -> RunConfig:
    """Read YAML files and merge them."""
    merged: dict[str, list[Any]] = {section: [] for section in KEYS}
    for path, config in _with_boards(paths):
        for section, content in config.items():
            keys = dict.fromkeys(lookup(KEYS, section, kind=f"key in {path}:"))
            entries = [content or {}] if section == "protocol" else content or []
            if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
                raise ConfigurationError(
                    f"{path}: {section!r} must be a list, and its entries 'key: value' lines."
                )
            for name in (name for entry in entries for name in entry):
                lookup(keys, str(name), kind=f"key in {path}, {section}:")
            merged[section] += entries
    where = ", ".join(map(str, paths))
    protocol = {name: value for entry in merged["protocol"] for name, value in entry.items()}
    environments = [_environment(entry) for entry in merged["environments"]]
    named = [one.get("id") for one in environments]
    agents = [
        {"slug": make_slug(str(entry.get("name"))), "packages": {}, **entry}
        for entry in merged["agents"]
    ]
    run = RunConfig(
        protocol=_record(Protocol, protocol, f"{where}, protocol"),
        environments=tuple(_record(EnvironmentRecord, one, where) for one in environments),
        agents=tuple(_record(AgentRecord, agent, where) for agent in agents),
        left_out=tuple(
            _record(LeftOut, entry, where)
            for entry in merged["left_out"]
            if entry.get("id") not in named
        ),
        optional=frozenset(
            record["slug"]
            for record, entry in zip(environments, merged["environments"], strict=True)
            if entry.get("optional")
        ),
    )
    for text in _problems(run):
        raise ConfigurationError(f"{where}: {text}.")
    return run


def _with_boards(paths: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each file, preceded by the one of its board."""
    for path in paths:
        config = read_config(path)
        if (name := config.pop("board", None)) is not None:
            board = lookup(PRESETS, str(name), kind="board")
            shared = {k: v for k, v in read_config(board).items() if k != "agents"}
            shared["environments"] = [one | {"optional": True} for one in shared["environments"]]
            yield board, shared
        yield path, config


def _environment(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an environment's record; its name is derived from the id by default."""
    name = entry.get("name") or re.sub(r"^.*/|-v\d+$", "", str(entry.get("id")))
    shared = {k: v for k, v in entry.items() if k not in ("name", "tasks", "optional")}
    return {"slug": make_slug(str(name)), "num_tasks": entry.get("tasks", DEFAULT_TASKS), **shared}


def _record(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    try:
        return type_adapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        name = values.get("slug", "")
        problem = ": ".join(filter(None, (name, *first_problem(error))))
        raise ConfigurationError(f"{where}: {problem}.") from None


def _problems(run: RunConfig) -> Iterator[str]:
    if not run.environments or not run.agents:
        yield "a run needs 'environments' and 'agents'"
    for records in (run.environments, run.agents):
        slugs = [record.slug for record in records]
        yield from (f"the name {slug!r} is repeated" for slug in slugs if slugs.count(slug) > 1)
    plain = {one.slug: None for one in run.environments if one.attack_on is None}
    for one in run.environments:
        lookup(gym.registry, one.id, kind="environment")
        if one.attack_on is not None:
            lookup(plain, one.attack_on, kind=f"environment attacked by {one.slug}")
    known = dict.fromkeys(one.slug for one in run.environments)
    for agent in run.agents:
        for slug in agent.not_played:
            lookup(known, slug, kind=f"environment in which {agent.slug} does not play")
        has_model = find_kind(agent.kind).needs_model or is_custom(agent.kind)
        if agent.prices is not None and not has_model:
            yield f"agent {agent.name!r}, {agent.kind!r} has no model. Leave out 'prices'"
    yield from misleading_names(run.agents)
