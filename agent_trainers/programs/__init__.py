"""Agents that are programs: their interface, and how a batch of them is run.

The public names are imported on first use: a program in its own process needs few of them.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agent_trainers.programs.environment_tools import EnvironmentTools
    from agent_trainers.programs.program import Outcome, ProgramSession
    from agent_trainers.programs.rollout import ProgramTasks

__all__ = ["EnvironmentTools", "Outcome", "ProgramSession", "ProgramTasks"]

_MODULES: Final = {
    "EnvironmentTools": "environment_tools",
    "Outcome": "program",
    "ProgramSession": "program",
    "ProgramTasks": "rollout",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
