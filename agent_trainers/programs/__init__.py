"""Agents that are programs: what they are given, what they return, and how a batch of them runs.

The public names are imported when they are first used: a program that runs as a process of its own
needs few of them.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agent_trainers.programs.environment_tools import EnvironmentTools
    from agent_trainers.programs.program import Outcome, ProgramSession
    from agent_trainers.programs.tasks import ProgramTasks

__all__ = ["EnvironmentTools", "Outcome", "ProgramSession", "ProgramTasks"]

_MODULES: Final = {
    "EnvironmentTools": "environment_tools",
    "Outcome": "program",
    "ProgramSession": "program",
    "ProgramTasks": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
