"""Agents that are programs: they ask the model at the gateway, and play with `EnvironmentTools`.

::

    def run(session, task):                # settings: {program: my_agent:run, model: ...}
        world = EnvironmentTools(**task["environment"])
        ...                                # session.base_url and session.key are the model
        return world.outcome(answer)

What a program says of its reward counts for nothing: its actions are played here, and scored as
everybody's are.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from pydantic import PositiveInt

from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import Agent, PlayedEpisode, tool_env
from agent_leaderboard.agents.model_source import ModelSettings, open_policy, read_settings
from agent_leaderboard.agents.repeated_play import total_usage
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.programs import Outcome, ProgramTasks
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

_NUMBER: Final = "number"
"""The field of a task with its place among those that are played together."""
NO_ACTIONS_TEXT: Final = (
    "the program returned no actions, so nobody could play them again. Let it play with "
    "EnvironmentTools(**task['environment']), and return its outcome(answer)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings(ModelSettings):
    """What `program` takes beside the model that the program asks."""

    program: str
    """``my_module:my_function``, or a command."""
    runner: str = "thread"
    """How it runs: a key of `agent_trainers.programs.runners.RUNNERS`."""
    variables: list[str] = field(default_factory=list)
    """Environment variables that a process gets besides the usual ones."""
    max_calls: PositiveInt = 64
    """Calls to the model that an episode may make."""
    ignored_parameters: list[str] = field(default_factory=list)
    """Parameters of requests that count for nothing; see `agent_trainers.Gateway`."""


class ProgramAgent:
    """Runs a program for each episode, then plays what it did."""

    def __init__(self, settings: ProgramSettings) -> None:
        """Run the program of `settings`."""
        self._settings = settings

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """See that the program is there, and that the environment has a name to make it by."""
        _environment(make_env)
        self._tasks([{}], lambda task, value: 0.0)

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Play one episode per spec, in order."""
        env = make_env()
        action_format = tool_env(env).action_format
        env.close()
        named = _environment(make_env)
        actions: dict[int, Sequence[str]] = {}

        def note(task: Mapping[str, Any], value: Any) -> float:
            actions[task[_NUMBER]] = _actions(value)
            return 0.0

        rows = [
            {"environment": {**named, "task": spec.task, "seed": spec.seed}, _NUMBER: i}
            for i, spec in enumerate(specs)
        ]
        tasks = self._tasks(rows, note)
        with open_policy(self._settings, action_format) as model:
            rollout = tasks.make_rollout(model)
            ran = rollout.collect([replace(spec, task=i) for i, spec in enumerate(specs)])
        played = _play_again(make_env, specs, actions)
        return [
            PlayedEpisode(
                trajectory=replace(played[i], timings=asked.timings)
                if i in played
                else _without_actions(asked),
                usage=total_usage([asked]),
            )
            for i, asked in enumerate(ran)
        ]

    def _tasks(
        self, rows: Sequence[Mapping[str, Any]], score: Callable[[dict[str, Any], Any], float]
    ) -> ProgramTasks:
        return ProgramTasks(
            self._settings.program,
            rows,
            reward=score,
            runner=self._settings.runner,
            variables=self._settings.variables,
            max_calls=self._settings.max_calls,
            ignored_parameters=self._settings.ignored_parameters,
        )


def program_agent(settings: Mapping[str, Any]) -> Agent:
    """Build an agent that is a program."""
    return ProgramAgent(read_settings(ProgramSettings, settings, "program"))


def _environment(make_env: Callable[[], TextEnv]) -> dict[str, Any]:
    """Return by what a program makes the environment for itself: its id and its arguments."""
    env = make_env()
    env.close()
    if env.spec is None:
        raise ConfigurationError("A program needs an environment that is registered by an id.")
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


def _without_actions(asked: Trajectory) -> Trajectory:
    """Return the episode of a program that ended without an outcome: a fault, or at its limits."""
    is_fault = asked.error is not None
    reason = asked.stop_reason if is_fault else StopReason.CONTEXT_OVERFLOW
    return replace(asked, transitions=[], metrics={}, stop_reason=reason)


class _Recorded(Policy):
    """Takes actions that are known; where they end, the episode ends open."""

    def __init__(self, actions: Sequence[Sequence[str]]) -> None:
        self._actions: list[Iterator[str]] = list(map(iter, actions))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._next(self._actions[request.episode_id]) for request in requests]

    def _next(self, actions: Iterator[str]) -> Generation:
        text = next(actions, None)
        if text is None:
            return Generation(text="", finish_reason="overflow")
        return Generation(text=text, usage=Usage())


def _play_again(
    make_env: Callable[[], TextEnv],
    specs: Sequence[EpisodeSpec],
    actions: Mapping[int, Sequence[str]],
) -> dict[int, Trajectory]:
    """Play what programs did; return the trajectory of each, by its place among the specs."""
    places = sorted(actions)
    again = [dataclasses.replace(specs[i], rng=np.random.default_rng(0)) for i in places]
    policy = _Recorded([actions[i] for i in places])
    with closing(Rollout(make_env, policy)) as rollout:
        return dict(zip(places, rollout.collect(again), strict=True))
