"""Has a language model tell its successes as skills, in its own words.

Each question is an episode of one step, so whatever policy answers is asked as in any rollout: many
at once, each with its own draws, and one that does not fit or fails costs only itself.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym

from agent_envs.core.spaces import UnicodeText
from agent_envs.errors import RolloutError
from agent_envs.formats.turn_reading import without_thoughts
from agent_trainers.experimental.skills.skills import TaskSkills
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory

MAX_MERGED: Final = 16
"""Skills of single tasks that the general one is made of at most."""
AT_ONCE: Final = 16
"""Questions after whose answers the skills so far are handed out."""
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


def mine_skills(
    policy: Policy, successes: Mapping[str, Trajectory], skills: TaskSkills, seed: int
) -> Iterator[TaskSkills]:
    """Have `policy` tell what is missing; yield all skills so far, now and then and at the end.

    One for each task, of what it did and saw, and last a general one, of the first `MAX_MERGED`.
    Tasks whose episode does not fit the policy have none.

    Args:
        policy: The model.
        successes: An episode of each task that was solved, by task id.
        skills: What was told before.
        seed: Of every draw.

    Raises:
        RolloutError: If the policy answers nothing.
    """
    missing = iter([task_id for task_id in successes if task_id not in skills])
    while portion := list(itertools.islice(missing, AT_ONCE)):
        questions = [_REQUEST + tell_episode(successes[task_id]) for task_id in portion]
        told = zip(portion, _ask(policy, questions, seed), strict=True)
        skills = {**skills, **{task_id: skill for task_id, skill in told if skill}}
        yield skills
    if skills and None not in skills:
        listed = [f"{i}. {skill}" for i, skill in enumerate(skills.values(), start=1)]
        (general,) = _ask(policy, [_GENERAL_REQUEST + "\n\n".join(listed[:MAX_MERGED])], seed)
        skills = {**skills, None: general} if general else skills
    yield skills


def tell_episode(trajectory: Trajectory) -> str:
    """Return an episode as a model can read it: the task, then actions and what came of them."""
    first, *later = trajectory.transitions
    parts = [str(message["content"]) for message in first.messages]
    parts.append(f"ACTION: {without_thoughts(first.action).strip()}")
    for transition in later:
        parts.append(f"OBSERVATION: {transition.messages[-1]['content']}")
        parts.append(f"ACTION: {without_thoughts(transition.action).strip()}")
    return "\n\n".join(parts)


class _Questions(gym.Env[str, str]):
    """Questions by number; any answer ends the episode."""

    observation_space = action_space = UnicodeText()
    is_immediate = True

    def __init__(self, questions: Sequence[str]) -> None:
        self._questions = questions

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Ask the question of number ``options["task"]``."""
        super().reset(seed=seed)
        assert options is not None
        question = self._questions[options["task"]]
        return question, {"messages": [{"role": "user", "content": question}]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the answer."""
        return "", 0.0, True, False, {}


def _ask(policy: Policy, questions: Sequence[str], seed: int) -> list[str]:
    """Return an answer to each question, without thoughts; empty where it did not fit."""
    make_env: Callable[[], _Questions] = lambda: _Questions(questions)  # noqa: E731
    answered = Rollout(make_env, policy).collect(plan_samples(range(len(questions)), 1, seed))
    failed = [t for t in answered if t.error is not None]
    if len(failed) == len(answered):
        raise RolloutError(f"The model answers nothing: {failed[0].error}")
    return [
        without_thoughts(t.transitions[0].action).strip() if t.transitions else "" for t in answered
    ]
