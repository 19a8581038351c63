"""Where a tiny policy's words and demonstrations come from: an environment, or a program."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.environments import count_tasks
from agent_trainers.policies.generation import GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.scripted import ScriptedPolicy
from agent_trainers.programs import ProgramTasks
from agent_trainers.rollout.demonstrations import Demonstration, play_reference
from agent_trainers.rollout.episode import TextEnv
from agent_trainers.rollout.evaluation import evaluate, evaluate_policy
from agent_trainers.trajectory import Trajectory

NUM_TESTED: Final = 48
Oracle = Callable[[dict[str, Any], Sequence[Any]], str]
"""What the model should say: to a task, and to the messages that it is shown."""


class Lessons(Protocol):
    """What a tiny policy learns from, and is measured by."""

    options: str
    """The options of a command line that name it."""

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None where they are endless."""

    def texts(self, tasks: Sequence[int]) -> Iterator[str]:
        """Yield what is said while tasks are solved."""

    def show(self, renderer: ChatRenderer, tasks: Sequence[int]) -> list[Trajectory]:
        """Return how tasks are solved, in the tokens of `renderer`."""

    def measure(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the share of tasks that `policy` solves."""


class EnvironmentLessons:
    """An environment's own reference actions."""

    def __init__(self, options: str, make_env: Callable[[], TextEnv]) -> None:
        """Learn from the environment that `make_env` makes."""
        self.options, self._make_env = options, make_env
        self.num_tasks = count_tasks(make_env)

    def texts(self, tasks: Sequence[int]) -> Iterator[str]:
        """Yield what is said while references are played: by the environment, and by these."""
        env = self._make_env()
        try:
            for task in tasks:
                _, info = env.reset(seed=task, options={"task": task})
                for action in getattr(env.unwrapped, "reference_actions", list)():
                    yield action
                    *_, terminated, truncated, info = env.step(action)
                    yield from (m["content"] for m in info["messages"] if m["role"] != "system")
                    if terminated or truncated:
                        break
        finally:
            env.close()

    def show(self, renderer: ChatRenderer, tasks: Sequence[int]) -> list[Trajectory]:
        """Return the references."""
        return list(play_reference(self._make_env, renderer, tasks))

    def measure(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the share of tasks that `policy` solves."""
        return evaluate_policy(self._make_env, policy, tasks).metrics.get("success", 0.0)


class ProgramLessons:
    """A program in which an oracle takes the place of the model, and what was said to it."""

    def __init__(self, options: str, source: ProgramTasks, oracle: Oracle) -> None:
        """Learn from what `oracle` says to the program of `source`."""
        self.options, self._source, self._oracle = options, source, oracle
        self.num_tasks = source.num_tasks
        self._asked: dict[int, list[tuple[GenerationRequest, str]]] = {}  # by task

    def texts(self, tasks: Sequence[int]) -> Iterator[str]:
        """Yield what the program and the oracle say to each other.

        Raises:
            ConfigurationError: If the oracle never succeeds; with the first error, if there is one.
        """
        self._play(tasks)
        for asked in self._asked.values():
            for request, turn in asked:
                yield from (m["content"] for m in request.messages if m["role"] != "system")
                yield turn

    def show(self, renderer: ChatRenderer, tasks: Sequence[int]) -> list[Trajectory]:
        """Return what the oracle said where it succeeded."""
        told = []
        for task in tasks:
            if asked := self._asked.get(task):
                demonstration = Demonstration(renderer, asked[0][0].tools)
                for request, turn in asked:
                    demonstration.add(request.messages, turn, renderer.turn_ids(turn))
                told.append(demonstration.trajectory(str(task), {"success": 1.0}))
        return told

    def measure(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the share of tasks that `policy` solves in the program."""
        rollout = self._source.make_rollout(policy)
        return evaluate(rollout, tasks).metrics.get("success", 0.0)

    def _play(self, tasks: Sequence[int]) -> None:
        asked: dict[int, list[tuple[GenerationRequest, str]]] = {task: [] for task in tasks}

        def act(request: GenerationRequest) -> str:
            task = tasks[request.episode_id]  # sessions are opened in the order of the tasks
            turn = self._oracle(dict(self._source.tasks[task]), request.messages)
            asked[task].append((request, turn))
            return turn

        played = evaluate(self._source.make_rollout(ScriptedPolicy(act)), tasks).trajectories
        solved = [t for t, trajectory in zip(tasks, played, strict=True) if trajectory.success]
        if not solved:
            error = next((t.error for t in played if t.error), "no error was kept")
            raise ConfigurationError(
                f"The oracle solves none of {len(tasks)} tasks. The first error:\n{error}"
            )
        self._asked = {task: asked[task] for task in solved}


def split_tasks(
    lessons: Lessons, count: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return tasks whose solution is shown, and others that are played to measure."""
    if lessons.num_tasks is None:
        drawn = rng.integers(ENDLESS, size=count + NUM_TESTED).tolist()
        return drawn[:count], drawn[count:]
    order = rng.permutation(lessons.num_tasks).tolist()
    num_tested = min(NUM_TESTED, lessons.num_tasks // 5)
    if num_tested == 0:
        return order, order
    return order[num_tested:][:count], order[:num_tested]
