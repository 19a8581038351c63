"""Agents of the leaderboard.

`AGENTS` is the table of built-in kinds. Model agents get their settings, with the protocol's
temperature and concurrency as defaults, and ``model``: a name or a folder. A custom agent is named
by its import path, ``my_package.agent:MyAgent`` (see `agent_leaderboard.agents.custom_agents`). Its
actions are replayed like those of every agent; that it would act so again cannot be checked.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from agent_envs.core.lookup import lookup
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_leaderboard.records.manifest import AgentRecord
from agent_trainers import TINY_POLICY
from agent_trainers.policies import Policy, Usage
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """An episode of an agent, and its cost."""

    trajectory: Trajectory
    """The attempt that counts."""
    attempts: tuple[Trajectory, ...] = ()
    """Other attempts, which cost but do not count."""
    usage: Usage = field(default_factory=Usage)
    """Usage of all attempts."""


class Agent(Protocol):
    """Runs episodes."""

    def check(self, make_env: MakeEnv) -> None:
        """Raise a `ConfigurationError` if the agent cannot act in an environment."""
        return

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order, drawing from each spec's own generator.

        Environments of `make_env` have the agent's tool format.
        """


@dataclass(frozen=True, slots=True)
class AgentKind:
    """A kind of agent."""

    module: str
    """Module of this package, with a function ``make_agent(kind, settings)``."""
    needs_model: bool = True
    tool_format: str | None = None
    """Tool format of its actions; None for the environment's own. The setting of this name wins."""


_MODEL: Final = AgentKind("model_agents")
_RULES: Final = AgentKind("no_model_agents", needs_model=False)
AGENTS: Final[Mapping[str, AgentKind]] = {
    **dict.fromkeys(("random", "heuristic", "oracle"), _RULES),
    "base_tool_call": _MODEL,
    "naive_rag": _MODEL,
    "react": AgentKind("model_agents", tool_format="react"),
    **dict.fromkeys(("iterative_rag", "reflexion", "best_of_n", "checkpoint"), _MODEL),
}
MODEL_SPEAKS: Final = frozenset(("base_tool_call", "react", "checkpoint", "reflexion", "best_of_n"))
"""Kinds whose actions are the model's own words, one call each."""


def find_kind(kind: str) -> AgentKind:
    """Look up a kind, or an import path, without importing it."""
    if ":" in kind:
        return AgentKind("custom_agents", needs_model=False)
    return lookup(AGENTS, kind, kind="kind of agent")


def is_custom(kind: str) -> bool:
    """Return whether an agent's code is not part of this package."""
    return ":" in kind


def acts_by_rules(kind: str) -> bool:
    """Return whether agents of this kind need no model."""
    return kind in AGENTS and not AGENTS[kind].needs_model


def is_repeatable(agent: AgentRecord) -> bool:
    """Return whether anyone can run an agent again: its code and its model are in this package."""
    return acts_by_rules(agent.kind) or (agent.train is None and base_model(agent) == TINY_POLICY)


def is_recounted(agent: AgentRecord) -> bool:
    """Return whether verification counts its calls and tokens again, on any machine."""
    is_known = base_model(agent) is not None and agent.kind in MODEL_SPEAKS - {"reflexion"}
    return is_repeatable(agent) or is_known


def base_model(agent: AgentRecord) -> Path | None:
    """Return the embedded policy, if an agent's model is or was trained from it."""
    given = agent.model
    if agent.train is not None:
        is_trained = agent.kind == "checkpoint" and agent.train and agent.weights_sha256
        given = agent.train.get("model", TINY_POLICY.name) if is_trained else None
    return TINY_POLICY if agent.kind in AGENTS and given == TINY_POLICY.name else None


def build_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build an agent of a kind: a key of `AGENTS`, or an import path."""
    make = pkgutil.resolve_name(f"{__package__}.{find_kind(kind).module}:make_agent")
    agent: Agent = make(kind, settings)
    return agent


# For agents


def tool_env(env: TextEnv) -> ToolEnv:
    """Return the environment below its wrappers."""
    base = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(
            f"{base}: the leaderboard needs environments with tools (ToolEnv)."
        )
    return base


def collect(make_env: MakeEnv, policy: Policy, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
    """Run one episode of a policy per spec, in order."""
    with closing(Rollout(make_env, policy)) as rollout:
        return rollout.collect(specs)


def total_usage(attempts: Sequence[Trajectory]) -> Usage:
    """Return the usage of some attempts together."""
    return sum((Usage(**attempt.usage) for attempt in attempts), Usage())
