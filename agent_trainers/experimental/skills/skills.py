"""Skills: texts on how to solve a task, taken from successful episodes.

A skill is privileged context: in training a teacher reads it, the acting policy never does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent_envs.data.records import read_records
from agent_envs.errors import DataError
from agent_envs.formats.turn_reading import without_thoughts
from agent_trainers.trajectory import Trajectory

GROUP: Final = "group"
"""Source of skills: the successful episodes of the group, instead of a file."""
NOTE: Final = "\n\nWhat worked before:\n{skill}"
"""Text with which a teacher reads a skill, after the last message of the first state."""

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
    joined. A malformed file or row is a DataError.
    """
    skills: TaskSkills = {}
    for number, row in enumerate(read_records(path), start=1):
        skill, task_id = row.get("skill"), row.get("task_id")
        is_id = task_id is None or isinstance(task_id, str | int)
        if not (isinstance(skill, str) and skill.strip() and is_id):
            raise DataError(
                f"{path}, row {number}: a row must be "
                '{"skill": "a text", "task_id": "a text or null"}, '
                f"not {row}."
            )
        key = None if task_id is None else str(task_id)
        skills[key] = f"{skills[key]}\n{skill.strip()}" if key in skills else skill.strip()
    if not skills:
        raise DataError(f"{path}: contains no skills.")
    return skills
