"""A task: what an episode is about, and how it is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agent_envs.errors import ConfigurationError

ENDLESS: Final = 2**31
"""Tasks are drawn from this many where a family has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question to answer, or one goal to reach."""

    id: str
    """Stable over runs, machines and versions of the package."""
    question: str
    """What the model is asked."""
    answers: tuple[str, ...]
    """Gold answers; any of them is right."""
    data: dict[str, Any] = field(default_factory=dict)
    """What else the environment knows about the task; never shown to the model."""


def choose_task(
    options: Mapping[str, Any], num_tasks: int | None, rng: np.random.Generator, *, family: str
) -> int:
    """Return the number of the task that `reset` plays.

    Args:
        options: Those of `reset`: ``{"task": number}``, or nothing to draw one.
        num_tasks: How many there are; None where they are endless.
        rng: Draws the number.
        family: The environment's class, for messages.

    Raises:
        ConfigurationError: If there are no tasks, not this one, or an option is unknown.
    """
    if unknown := sorted(set(options) - {"task"}):
        raise ConfigurationError(f"reset() knows the option 'task' only, not {unknown}.")
    limit = ENDLESS if num_tasks is None else num_tasks
    if limit < 1:
        raise ConfigurationError(
            f"{family}.num_tasks is {limit}, so there is nothing to play. Return at least 1, or "
            "None where tasks are endless."
        )
    if (number := options.get("task")) is None:
        return int(rng.integers(limit))
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise ConfigurationError(f"options['task'] must be an integer, not {number!r}.")
    if not 0 <= number < limit:
        raise ConfigurationError(f"There is no task {number}: tasks are 0 to {limit - 1}.")
    return int(number)
