"""Skills: short texts on how to solve a task, taken from successful episodes.

A skill is privileged context: in training a teacher reads it, the acting policy never does.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym

from agent_envs.core.spaces import UnicodeText
from agent_envs.data.records import read_records
from agent_envs.errors import DataError, RolloutError
from agent_envs.formats.turn_reading import without_thoughts
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory

GROUP: Final = "group"
"""Source of skills: the successful episodes of the group, instead of a file."""
NOTE: Final = "\n\nWhat worked before:\n{skill}"
"""Text with which a teacher reads a skill, after the last message of the first state."""
MAX_MERGED: Final = 16
"""Skills of single tasks that the general skill is made of."""
PORTION: Final = 16
"""Requests between two results of `mine_skills`."""
_REQUEST: Final = (
    "Below is an episode in which you solved a task. Write a skill: how to solve tasks of this "
    "kind, in at most five short sentences. Say which tools to use, in which order, and which "
    "mistakes to avoid. Leave out names and the answer of this task, so that it helps with others. "
    "Write the skill and nothing else.\n\n"
)
_GENERAL_REQUEST: Final = (
    "Below are skills, each learned from one task. Make one skill of them that holds for all such "
    "tasks, in at most five short sentences. Write the skill and nothing else.\n\n"
)

TaskSkills = dict[str | None, str]
"""Skills by task id; None is the key of the skill for all other tasks."""


class Success(NamedTuple):
    """A successful episode; the best of a group sorts first."""

    group_id: str
    cost: float
    """Negative return."""
    num_steps: int
    number: int
    """Index in the batch or file."""
    skill: str


def find_success(trajectory: Trajectory, number: int) -> Success | None:
    """Return the success of the `number`-th episode, with its actions as the skill."""
    if not (trajectory.is_scorable and trajectory.success):
        return None
    skill = "\n".join(without_thoughts(t.action).strip() for t in trajectory.transitions)
    num_steps = len(trajectory.transitions)
    return Success(trajectory.group_id, -trajectory.return_, num_steps, number, skill)


def best_other(successes: Sequence[Success], group_id: str, number: int) -> str | None:
    """Return the skill of the group's best success other than episode `number`.

    An episode that read itself would be drawn to its own actions
    (``dont_reprompt_on_self_success`` of TRL's SDPO).
    """
    others = [s for s in successes if s.group_id == group_id and s.number != number]
    return min(others).skill if others else None


def read_skills(path: str | Path) -> TaskSkills:
    """Read a file of rows ``{"skill": "...", "task_id": "..."}``.

    Rows without ``task_id`` hold for all tasks without their own skill; rows of the same task are
    joined.

    Raises:
        DataError: If the file or a row is malformed; names file, row and field.
    """
    skills: TaskSkills = {}
    for number, row in enumerate(read_records(path), start=1):
        skill, task_id = row.get("skill"), row.get("task_id")
        if not isinstance(skill, str) or not skill.strip():
            raise DataError(
                f"{path}, row {number}: 'skill' must be a text, not {skill!r}. A row is "
                '{"skill": "...", "task_id": "..."}.'
            )
        if task_id is not None and not isinstance(task_id, str | int):
            raise DataError(
                f"{path}, row {number}: 'task_id' must be a text or null, not {task_id!r}."
            )
        key = None if task_id is None else str(task_id)
        skills[key] = f"{skills[key]}\n{skill.strip()}" if key in skills else skill.strip()
    if not skills:
        raise DataError(f"{path}: contains no skills.")
    return skills


def mine_skills(
    policy: Policy, successes: Mapping[str, Trajectory], skills: TaskSkills, seed: int
) -> Iterator[TaskSkills]:
    """Let a model write the missing skills; yield all skills after each portion and at the end.

    Each task gets a skill from its episode, and the first `MAX_MERGED` of them are merged into a
    general one. A task whose episode exceeds the context of the model gets none.

    Args:
        policy: The model.
        successes: A successful episode of each task, by task id.
        skills: Existing skills.
        seed: Seed of all draws.

    Raises:
        RolloutError: If every request fails.
    """
    missing = iter([task_id for task_id in successes if task_id not in skills])
    while portion := list(itertools.islice(missing, PORTION)):
        requests = [_REQUEST + describe_episode(successes[task_id]) for task_id in portion]
        written = zip(portion, _generate(policy, requests, seed), strict=True)
        skills = {**skills, **{task_id: skill for task_id, skill in written if skill}}
        yield skills
    if skills and None not in skills:
        listed = [f"{i}. {skill}" for i, skill in enumerate(skills.values(), start=1)]
        (general,) = _generate(policy, [_GENERAL_REQUEST + "\n\n".join(listed[:MAX_MERGED])], seed)
        skills = {**skills, None: general} if general else skills
    yield skills


def describe_episode(trajectory: Trajectory) -> str:
    """Return an episode as text: the first messages, then actions and observations."""
    first, *later = trajectory.transitions
    parts = [str(message["content"]) for message in first.messages]
    parts.append(f"ACTION: {without_thoughts(first.action).strip()}")
    for transition in later:
        parts.append(f"OBSERVATION: {transition.messages[-1]['content']}")
        parts.append(f"ACTION: {without_thoughts(transition.action).strip()}")
    return "\n\n".join(parts)


class _Requests(gym.Env[str, str]):
    """Requests by index; any answer ends the episode."""

    observation_space = action_space = UnicodeText()
    is_immediate = True

    def __init__(self, requests: Sequence[str]) -> None:
        self._requests = requests

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the request of index ``options["task"]``."""
        super().reset(seed=seed)
        assert options is not None
        request = self._requests[options["task"]]
        return request, {"messages": [{"role": "user", "content": request}]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", 0.0, True, False, {}


def _generate(policy: Policy, requests: Sequence[str], seed: int) -> list[str]:
    """Return the answer to each request without thoughts; empty if it exceeds the context."""
    make_env: Callable[[], _Requests] = lambda: _Requests(requests)  # noqa: E731
    answered = Rollout(make_env, policy).collect(plan_samples(range(len(requests)), 1, seed))
    failed = [t for t in answered if t.error is not None]
    if len(failed) == len(answered):
        raise RolloutError(f"All requests to the model failed: {failed[0].error}")
    return [
        without_thoughts(t.transitions[0].action).strip() if t.transitions else "" for t in answered
    ]
