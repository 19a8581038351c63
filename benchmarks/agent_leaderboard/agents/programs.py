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
from agent_leaderboard.agents.agent import Agent, PlayedEpisode, tool_env
from agent_leaderboard.agents.model_agents import ModelSettings, open_policy, read_settings
from agent_leaderboard.agents.repeated_attempts import total_usage
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.programs import Outcome, ProgramTasks
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
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

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """Check that the program exists, and that the environment is registered."""
        _environment(make_env)
        self._tasks([{}], lambda task, value: 0.0)

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        with closing(make_env()) as env:
            tool_format = tool_env(env).action_format
        environment = _environment(make_env)
        actions: dict[int, Sequence[str]] = {}

        def record(task: Mapping[str, Any], value: Any) -> float:
            actions[task[_NUMBER]] = _actions(value)
            return 0.0

        rows = [
            {"environment": {**environment, "task": spec.task, "seed": spec.seed}, _NUMBER: i}
            for i, spec in enumerate(specs)
        ]
        tasks = self._tasks(rows, record)
        with open_policy(self._settings, tool_format) as model:
            rollout = tasks.make_rollout(model)
            calls = rollout.collect([replace(spec, task=i) for i, spec in enumerate(specs)])
        replayed = _replay(make_env, specs, actions)
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
        settings = self._settings
        return ProgramTasks(
            settings.program,
            rows,
            reward=score,
            runner=settings.runner,
            variables=settings.variables,
            max_calls=settings.max_calls,
            ignored_parameters=settings.ignored_parameters,
        )


def program_agent(settings: Mapping[str, Any]) -> Agent:
    """Build an agent that is a program."""
    return ProgramAgent(read_settings(ProgramSettings, settings, "program"))


def _environment(make_env: Callable[[], TextEnv]) -> dict[str, Any]:
    """Return id and arguments with which a program makes the environment."""
    with closing(make_env()) as env:
        if env.spec is None:
            raise ConfigurationError("A program needs a registered environment.")
        return {"env_id": env.spec.id, **env.spec.kwargs}


def _actions(value: Any) -> Sequence[str]:
    found = value.actions if isinstance(value, Outcome) else None
    if isinstance(value, Mapping):  # of a process, as JSON
        found = value.get("actions")
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise TypeError(NO_ACTIONS_TEXT)
    if not found:
        raise ValueError(NO_ACTIONS_TEXT)
    return found


def _without_actions(called: Trajectory) -> Trajectory:
    """Return the episode of a program without an outcome: a failure, or at its limits."""
    reason = called.stop_reason if called.error is not None else StopReason.CONTEXT_OVERFLOW
    return replace(called, transitions=[], metrics={}, stop_reason=reason)


class _RecordedPolicy(Policy):
    """Repeats recorded actions; after them, the episode ends open."""

    def __init__(self, actions: Sequence[Sequence[str]]) -> None:
        self._actions = list(map(iter, actions))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._next(request) for request in requests]

    def _next(self, request: GenerationRequest) -> Generation:
        text = next(self._actions[request.episode_id], None)
        if text is None:
            return Generation(text="", finish_reason="overflow")
        return Generation(text=text, usage=Usage())


def _replay(
    make_env: Callable[[], TextEnv],
    specs: Sequence[EpisodeSpec],
    actions: Mapping[int, Sequence[str]],
) -> dict[int, Trajectory]:
    """Replay the actions of programs; return each trajectory by the index of its spec."""
    indices = sorted(actions)
    again = [replace(specs[i], rng=np.random.default_rng(0)) for i in indices]
    policy = _RecordedPolicy([actions[i] for i in indices])
    with closing(Rollout(make_env, policy)) as rollout:
        return dict(zip(indices, rollout.collect(again), strict=True))
