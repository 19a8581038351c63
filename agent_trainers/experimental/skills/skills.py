"""Skills: short texts on how a task was solved, told of episodes that succeeded.

They are privileged context: in training a teacher reads them, the policy that acts never does. Here
a skill is the actions of an episode; `agent_trainers.experimental.skills.skill_mining` lets a model
write it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent_envs.data.records import read_records
from agent_envs.errors import DataError
from agent_envs.formats.turn_reading import without_thoughts
from agent_trainers.trajectory import Trajectory

GROUP: Final = "group"
"""In place of a file: skills are told of the group's own episodes."""
NOTE: Final = "\n\nWhat worked before:\n{skill}"
"""How a teacher is shown a skill, after the first state's last message."""

TaskSkills = dict[str | None, str]
"""Skills by task id; under None the one for all other tasks."""


class Success(NamedTuple):
    """An episode that succeeded, as others are told of it; the best of a group sorts first."""

    group_id: str
    cost: float
    """The return, with its sign changed."""
    num_steps: int
    number: int
    """Its place in the batch, or in the file."""
    skill: str


def tell_success(trajectory: Trajectory, number: int) -> Success | None:
    """Tell what an episode did, the `number`-th of its batch; None if it did not succeed."""
    if not (trajectory.is_scorable and trajectory.success):
        return None
    num_steps, skill = len(trajectory.transitions), tell_actions(trajectory)
    return Success(trajectory.group_id, -trajectory.return_, num_steps, number, skill)


def tell_actions(trajectory: Trajectory) -> str:
    """Return the actions of an episode, one after the other, without thoughts."""
    return "\n".join(without_thoughts(t.action).strip() for t in trajectory.transitions)


def best_other(successes: Sequence[Success], group_id: str, number: int) -> str | None:
    """Return the skill of the best success of a group, apart from episode `number` itself.

    The highest return, of those the fewest steps, of those the first. An episode that saw itself
    would be drawn to what it did anyway (``dont_reprompt_on_self_success`` of TRL's SDPO).
    """
    others = [s for s in successes if s.group_id == group_id and s.number != number]
    return min(others).skill if others else None


def read_skills(path: str | Path) -> TaskSkills:
    """Read a file of skills.

    A row is ``{"skill": "...", "task_id": "..."}``. Rows without ``task_id`` (or with null) are for
    tasks that have none of their own; several rows for the same are joined.

    Raises:
        DataError: If the file cannot be read, or a row is none; names file, row and field.
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
        raise DataError(f"{path}: holds no skills.")
    return skills


def skill_finder(path: str | Path) -> Callable[[str], str | None]:
    """Return what gives the skill of a task by its id, from a file: its own, or that for all."""
    skills = read_skills(path)
    return lambda task_id: skills.get(task_id, skills.get(None))
