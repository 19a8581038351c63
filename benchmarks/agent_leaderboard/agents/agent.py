"""Agents of the leaderboard.

`AGENTS` is the table of built-in kinds. Model agents get their settings, with the protocol's
temperature and concurrency as defaults, and ``model``: a name or a folder. A custom agent is named
by its import path, ``my_package.agent:MyAgent`` (see `agent_leaderboard.agents.custom_agents`), or
is a program (`agent_leaderboard.agents.programs`). Its actions are replayed like those of every
agent; that it would act so again cannot be checked.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agent_envs.core.lookup import lookup
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_trainers.policies import Usage
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """An episode of an agent, and its cost."""

    trajectory: Trajectory
    """The attempt that counts."""
    attempts: tuple[Trajectory, ...] = ()
    """Other attempts, which cost but do not count."""
    usage: Usage = field(default_factory=Usage)
    """Usage of all attempts."""

    @property
    def actions(self) -> list[str]:
        """Actions of the attempt that counts."""
        return [step.action for step in self.trajectory.transitions]


class Agent(Protocol):
    """Runs episodes."""

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """Check that the agent can act in an environment, before any episode.

        Raises:
            ConfigurationError: If it cannot; names agent and environment.
        """

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Run one episode per spec, in order, drawing from each spec's own generator.

        Environments of `make_env` have the agent's tool format.
        """


@dataclass(frozen=True, slots=True)
class AgentKind:
    """A kind of agent."""

    builder: str
    """``module:function`` in this package; takes the settings, returns an `Agent`."""
    needs_model: bool = True
    is_custom: bool = False
    """Whether its code is not part of this package."""
    tool_format: str | None = None
    """Tool format of its actions; None for the environment's own. The setting of this name wins."""

    def format_for(self, settings: Mapping[str, Any]) -> str | None:
        """Return the tool format of an agent with these settings."""
        chosen: str | None = settings.get("tool_format", self.tool_format)
        return chosen


AGENTS: Final[Mapping[str, AgentKind]] = {
    "random": AgentKind("no_model_agents:random_agent", needs_model=False),
    "heuristic": AgentKind("no_model_agents:heuristic_agent", needs_model=False),
    "oracle": AgentKind("no_model_agents:oracle_agent", needs_model=False),
    "base_tool_call": AgentKind("model_agents:base_tool_call"),
    "naive_rag": AgentKind("model_agents:naive_rag"),
    "react": AgentKind("model_agents:react", tool_format="react"),
    "self_ask": AgentKind("model_agents:self_ask"),
    "iterative_rag": AgentKind("model_agents:iterative_rag"),
    "reflexion": AgentKind("model_agents:reflexion"),
    "best_of_n": AgentKind("model_agents:best_of_n"),
    "checkpoint": AgentKind("model_agents:checkpoint"),
    "program": AgentKind("programs:program_agent", is_custom=True),
}


def find_kind(kind: str) -> AgentKind:
    """Look up a kind, or an import path, without importing it.

    Raises:
        UnknownNameError: If there is no such kind.
    """
    if ":" in kind:
        return AgentKind(kind, needs_model=False, is_custom=True)
    return lookup(AGENTS, kind, kind="kind of agent")


def is_custom(kind: str) -> bool:
    """Return whether an agent's code is not part of this package."""
    return ":" in kind or (kind in AGENTS and AGENTS[kind].is_custom)


def acts_by_rules(kind: str) -> bool:
    """Return whether anyone can run agents of this kind again."""
    return kind in AGENTS and not AGENTS[kind].needs_model


def import_path(agent: Callable[..., Any]) -> str:
    """Return the import path of a custom agent's class or function.

    Raises:
        ConfigurationError: If other processes could not import it.
    """
    path = f"{agent.__module__}:{agent.__qualname__}"
    if "<" in path:
        raise ConfigurationError(
            f"The agent {path} is defined inside a function, where other processes cannot import "
            "it. Define it at the top of a module."
        )
    return path


def tool_env(env: TextEnv) -> ToolEnv:
    """Return the environment below its wrappers.

    Raises:
        ConfigurationError: If it is not a `ToolEnv`.
    """
    base = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(
            f"{base}: the leaderboard needs environments with tools (ToolEnv)."
        )
    return base


def build_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build an agent of a kind: a key of `AGENTS`, or an import path.

    Raises:
        UnknownNameError: If there is no such kind.
        ConfigurationError: If a setting is wrong, or a custom agent cannot be imported.
    """
    agent: Agent
    if ":" in kind:
        build = pkgutil.resolve_name(f"{__package__}.custom_agents:build_custom_agent")
        agent = build(kind, settings)
    else:
        agent = pkgutil.resolve_name(f"{__package__}.{find_kind(kind).builder}")(settings)
    return agent
