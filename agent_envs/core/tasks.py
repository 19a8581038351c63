"""A task: what an episode is about."""

from dataclasses import dataclass, field
from typing import Any


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
