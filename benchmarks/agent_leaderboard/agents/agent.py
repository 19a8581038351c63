"""What takes part in the leaderboard: an agent plays episodes.

`AGENTS` is the table of their kinds. Those on a model get their settings, with the protocol's
temperature and concurrency where the settings do not say otherwise, and ``model``: a name or a
folder. An agent of one's own is named by where it is imported from, ``my_package.agent:MyAgent``
(see `agent_leaderboard.agents.own_agents`), or is a program (`agent_leaderboard.agents.programs`).
What it did is played again as with every agent; that it would do so again nobody else can check.
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
    """An episode, and what it took."""

    trajectory: Trajectory
    """The attempt that counts."""
    attempts: tuple[Trajectory, ...] = ()
    """Earlier or other attempts, which cost but do not count."""
    usage: Usage = field(default_factory=Usage)
    """Over all attempts."""

    @property
    def actions(self) -> list[str]:
        """What the agent wrote in the attempt that counts."""
        return [step.action for step in self.trajectory.transitions]


class Agent(Protocol):
    """Plays episodes."""

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """See that the agent can play in an environment, before anything is played.

        Raises:
            ConfigurationError: If it cannot; names agent and environment.
        """

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Play one episode per spec, in order; every draw comes from a spec's own generator.

        What `make_env` makes is in the agent's tool format.
        """


@dataclass(frozen=True, slots=True)
class AgentKind:
    """A kind of agent."""

    builder: str
    """``module:function`` below this package; takes the settings, returns an `Agent`."""
    needs_model: bool = True
    is_own: bool = False
    """Whether its code is its author's own, which nobody else has."""
    tool_format: str | None = None
    """The tool format it acts in, given to the environment, and again when its actions are played
    back; None for the environment's own. A setting ``tool_format`` wins over it."""

    def format_for(self, settings: Mapping[str, Any]) -> str | None:
        """Return the tool format that an agent with these settings acts in."""
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
    "program": AgentKind("programs:program_agent", is_own=True),
}


OWN: Final = "own_agents:build_own_agent"
"""Builds an agent of one's own."""


def find_kind(kind: str) -> AgentKind:
    """Return the kind of that name, or of an agent of one's own; nothing is imported for it.

    Raises:
        UnknownNameError: If there is no such kind.
    """
    if ":" in kind:
        return AgentKind(kind, needs_model=False, is_own=True)
    return lookup(AGENTS, kind, kind="kind of agent")


def is_own(kind: str) -> bool:
    """Return whether an agent's code is its author's own, which nobody else has."""
    return ":" in kind or (kind in AGENTS and AGENTS[kind].is_own)


def acts_by_rules(kind: str) -> bool:
    """Return whether anybody can ask agents of this kind again what they do."""
    return kind in AGENTS and not AGENTS[kind].needs_model


def import_path(agent: Callable[..., Any]) -> str:
    """Return the kind that stands for a class or a function of one's own.

    Raises:
        ConfigurationError: If no other process could import it.
    """
    path = f"{agent.__module__}:{agent.__qualname__}"
    if "<" in path:
        raise ConfigurationError(
            f"The agent {path} is made inside a function, where no other process finds it. Define "
            "it at the top of a module."
        )
    return path


def tool_env(env: TextEnv) -> ToolEnv:
    """Return the environment below its wrappers.

    Raises:
        ConfigurationError: If it is no `ToolEnv`.
    """
    base = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(
            f"{base}: the leaderboard plays environments with tools (ToolEnv)."
        )
    return base


def build_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build an agent of a kind: a key of `AGENTS`, or the import path of one's own.

    Raises:
        UnknownNameError: If there is no such kind.
        ConfigurationError: If a setting is wrong, or an agent of one's own cannot be imported.
    """
    if ":" in kind:
        own: Agent = pkgutil.resolve_name(f"{__package__}.{OWN}")(kind, settings)
        return own
    agent: Agent = pkgutil.resolve_name(f"{__package__}.{find_kind(kind).builder}")(settings)
    return agent
