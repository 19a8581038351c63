"""Agents that are programs: they call the model through the gateway.

::

    def run(session, task):                # settings: {program: my_agent:run, model: ...}
        world = EnvironmentTools(**task["environment"])
        ...                                # session.base_url and session.key are the model
        return world.outcome(answer)

The reward that a program returns is ignored: its actions are replayed and scored here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from pydantic import PositiveInt

from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import (
    Agent,
    MakeEnv,
    PlayedEpisode,
    collect,
    format_of,
    total_usage,
)
from agent_leaderboard.agents.model_agents import ModelSettings, open_policy, read_settings
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.programs import Outcome, ProgramTasks
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

_NUMBER: Final = "number"
"""Task field with the index of the episode."""
NO_ACTIONS_TEXT: Final = (
    "the program returned no actions, so they cannot be replayed. Let it act through "
    "EnvironmentTools(**task['environment']), and return its outcome(answer)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings(ModelSettings):
    """Settings of `program`, in addition to those of the model that it calls."""

    program: str
    """``my_module:my_function``, or a command."""
    runner: str = "thread"
    """Key of `agent_trainers.programs.runners.RUNNERS`."""
    variables: list[str] = field(default_factory=list)
    """Additional environment variables of a process."""
    max_calls: PositiveInt = 64
    """Model calls of an episode."""
    ignored_parameters: list[str] = field(default_factory=list)
    """Ignored request parameters; see `agent_trainers.Gateway`."""


class ProgramAgent:
    """Runs a program for each episode, then replays its actions."""

    def __init__(self, settings: ProgramSettings) -> None:
        """Run the program of `settings`."""
        self._settings = settings

    def check(self, make_env: MakeEnv) -> None:
        """Check that the program exists, and that the environment is registered."""
        _environment(make_env)
        self._tasks([{}], lambda task, value: 0.0)

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        environment = _environment(make_env)
        actions: dict[int, Sequence[str]] = {}

        def record(task: Mapping[str, Any], value: Any) -> float:
            actions[task[_NUMBER]] = _actions(value)
            return 0.0

        rows = [
            {"environment": {**environment, "task": spec.task, "seed": spec.seed}, _NUMBER: i}
            for i, spec in enumerate(specs)
        ]
        with open_policy(self._settings, format_of(make_env)) as model:
            rollout = self._tasks(rows, record).make_rollout(model)
            calls = rollout.collect([replace(spec, task=i) for i, spec in enumerate(specs)])
        numbers = sorted(actions)
        again = [replace(specs[i], rng=np.random.default_rng(0)) for i in numbers]
        trajectories = collect(make_env, _RecordedPolicy([actions[i] for i in numbers]), again)
        replayed = dict(zip(numbers, trajectories, strict=True))
        return [
            PlayedEpisode(
                trajectory=replace(replayed[i], timings=called.timings)
                if i in replayed
                else _without_actions(called),
                usage=total_usage([called]),
            )
            for i, called in enumerate(calls)
        ]

    def _tasks(
        self, rows: Sequence[Mapping[str, Any]], score: Callable[[dict[str, Any], Any], float]
    ) -> ProgramTasks:
        names = ("runner", "variables", "max_calls", "ignored_parameters")
        options: dict[str, Any] = {name: getattr(self._settings, name) for name in names}
        return ProgramTasks(self._settings.program, rows, reward=score, **options)


def make_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build an agent that is a program."""
    return ProgramAgent(read_settings(ProgramSettings, settings, kind))


def _environment(make_env: MakeEnv) -> dict[str, Any]:
    """Return id and arguments with which a program makes the environment."""
    with closing(make_env()) as env:
        if env.spec is None:
            raise ConfigurationError("A program needs a registered environment.")
        return {"env_id": env.spec.id, **env.spec.kwargs}


def _actions(value: Any) -> Sequence[str]:
    found = value.actions if isinstance(value, Outcome) else None
    if isinstance(value, Mapping):  # of a process, as JSON
        found = value.get("actions")
    is_text = isinstance(found, list | tuple) and all(isinstance(one, str) for one in found)
    if not found or not is_text:
        raise ValueError(NO_ACTIONS_TEXT)
    return tuple(found)


def _without_actions(called: Trajectory) -> Trajectory:
    """Return the episode of a program without an outcome: a failure, or at its limits."""
    reason = called.stop_reason if called.error is not None else StopReason.CONTEXT_OVERFLOW
    return replace(called, transitions=[], metrics={}, stop_reason=reason)


class _RecordedPolicy(Policy):
    """Repeats recorded actions; after them, the episode ends open."""

    def __init__(self, actions: Sequence[Sequence[str]]) -> None:
        self._actions = list(map(iter, actions))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        texts = [next(self._actions[request.episode_id], None) for request in requests]
        return [
            Generation(text="", finish_reason="overflow")
            if text is None
            else Generation(text=text, usage=Usage())
            for text in texts
        ]
