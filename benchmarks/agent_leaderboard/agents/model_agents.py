"""Agents on a model: a local one, one in vLLM, or a served one.

`base_tool_call` lets the model call the tools itself, without any training for the task; `react`
is the same in ReAct's format, `checkpoint` the same with a trained model. `naive_rag`, `self_ask`
and `iterative_rag` search by a plan. `reflexion` and `best_of_n` play a task several times.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import Agent, PlayedEpisode, tool_env
from agent_leaderboard.agents.model_source import (
    ModelSettings,
    check_format,
    open_policy,
    read_settings,
)
from agent_leaderboard.agents.repeated_play import (
    Collect,
    play_best_of,
    play_with_reflection,
    total_usage,
)
from agent_leaderboard.agents.strategies import IterativeRAG, NaiveRAG, SelfAsk
from agent_trainers.policies import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]
Strategy = Callable[[Policy, ToolFormat], Policy]
PlayAttempts = Callable[[Policy, Collect, Sequence[EpisodeSpec]], list[PlayedEpisode]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativeSettings(ModelSettings):
    """What `iterative_rag` takes."""

    iterations: PositiveInt = 3
    """How often it searches and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflexionSettings(ModelSettings):
    """What `reflexion` takes."""

    trials: PositiveInt = 3
    """Attempts at a task, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfSettings(ModelSettings):
    """What `best_of_n` takes."""

    samples: PositiveInt = 5
    """Attempts at a task."""


class ModelAgent:
    """Plays with a policy that a strategy makes of the model's."""

    def __init__(
        self,
        kind: str,
        settings: ModelSettings,
        *,
        strategy: Strategy | None = None,
        num_turns_needed: int = 1,
        play_attempts: PlayAttempts | None = None,
    ) -> None:
        """Play as `kind`.

        Args:
            kind: The agent's kind, for messages.
            settings: The model, and how it is asked.
            strategy: What makes a policy of the model's; it needs a search tool. None lets the
                model act by itself.
            num_turns_needed: Turns that a question takes at least.
            play_attempts: Plays each task several times; None plays it once.
        """
        self._kind = kind
        self._settings = settings
        self._strategy = strategy
        self._num_turns_needed = num_turns_needed
        self._play_attempts = play_attempts or _play_once

    def check(self, make_env: MakeEnv) -> None:
        """See that the agent can play in an environment; the model is not loaded for it."""
        self._checked_format(make_env)

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Play one episode per spec, in order."""
        tool_format = self._checked_format(make_env)
        with open_policy(self._settings, tool_format) as model:

            def collect(policy: Policy, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
                acting = self._strategy(policy, tool_format) if self._strategy else policy
                with contextlib.closing(Rollout(make_env, acting)) as rollout:
                    return rollout.collect(specs)

            return self._play_attempts(model, collect, specs)

    def _checked_format(self, make_env: MakeEnv) -> ToolFormat:
        """Return the tool format of the environment, if the agent can play in it."""
        env = make_env()
        try:
            base = tool_env(env)
            if self._strategy is not None:
                name = env.spec.id if env.spec is not None else type(base).__name__
                limit = env.spec.max_episode_steps if env.spec is not None else None
                self._check_search(base, name, limit)
            check_format(self._settings, base.action_format)
            return base.action_format
        finally:
            env.close()

    def _check_search(self, env: ToolEnv, name: str, max_turns: int | None) -> None:
        search = env.tools.get("search")
        if search is None or set(search.parameters.get("properties", {})) != {"query"}:
            tools = ", ".join(env.tools) or "none"
            raise ConfigurationError(
                f"Agent {self._kind!r} needs a tool search(query), which {name} lacks (its tools: "
                f"{tools}). Leave the agent out of the runs on this environment."
            )
        if max_turns is not None and max_turns < self._num_turns_needed:
            raise ConfigurationError(
                f"Agent {self._kind!r} takes {self._num_turns_needed} turns for a question, and "
                f"{name} ends after {max_turns}. Lower its settings, or raise "
                "max_episode_steps."
            )


def _agent(kind: str, **options: Any) -> Callable[[Mapping[str, Any]], Agent]:
    """Return what builds an agent that takes nothing but `ModelSettings`."""

    def build(settings: Mapping[str, Any]) -> Agent:
        return ModelAgent(kind, read_settings(ModelSettings, settings, kind), **options)

    return build


base_tool_call = _agent("base_tool_call")
"""Lets the model call the tools itself."""
react = _agent("react")
"""Lets the model think and act as ReAct does (Yao et al., arXiv 2210.03629): the prompt and the
rhythm are the environment's tool format ``react``."""
naive_rag = _agent("naive_rag", strategy=NaiveRAG, num_turns_needed=2)
"""Searches once with the question, and answers."""
self_ask = _agent("self_ask", strategy=SelfAsk, num_turns_needed=2)
"""Searches for follow-up questions that the model asks itself."""


def checkpoint(settings: Mapping[str, Any]) -> Agent:
    """Let a trained model act: a folder that ``agent-r1-train`` wrote.

    Raises:
        ConfigurationError: If there is no model in the folder.
    """
    read = read_settings(ModelSettings, settings, "checkpoint")
    if read.base_url is None and not (Path(read.model) / "config.json").is_file():
        raise ConfigurationError(
            f"checkpoint: there is no model in {read.model}. Pass the folder of a trained model "
            "(--output_dir of agent-r1-train), or base_url where it is served."
        )
    return ModelAgent("checkpoint", read)


def iterative_rag(settings: Mapping[str, Any]) -> Agent:
    """Search and answer in turns, each search with the last answer."""
    read = read_settings(IterativeSettings, settings, "iterative_rag")
    strategy = functools.partial(IterativeRAG, iterations=read.iterations)
    turns = read.iterations + 1
    return ModelAgent("iterative_rag", read, strategy=strategy, num_turns_needed=turns)


def reflexion(settings: Mapping[str, Any]) -> Agent:
    """Try again with what the model notes about its failure; see `play_with_reflection`."""
    read = read_settings(ReflexionSettings, settings, "reflexion")
    play = functools.partial(play_with_reflection, trials=read.trials)
    return ModelAgent("reflexion", read, play_attempts=play)


def best_of_n(settings: Mapping[str, Any]) -> Agent:
    """Play several times and take the answer that comes most often; see `play_best_of`.

    Raises:
        ConfigurationError: If all samples would be the same.
    """
    read = read_settings(BestOfSettings, settings, "best_of_n")
    if read.temperature == 0 and read.samples > 1:
        raise ConfigurationError(
            "best_of_n at temperature 0 plays the same episode each time. Raise temperature, or "
            "use base_tool_call."
        )
    play = functools.partial(play_best_of, samples=read.samples)
    return ModelAgent("best_of_n", read, play_attempts=play)


def _play_once(
    model: Policy, collect: Collect, specs: Sequence[EpisodeSpec]
) -> list[PlayedEpisode]:
    return [
        PlayedEpisode(trajectory=trajectory, usage=total_usage([trajectory]))
        for trajectory in collect(model, specs)
    ]
