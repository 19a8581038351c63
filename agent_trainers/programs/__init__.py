"""Agents that are programs: what they are given, what they return, and how a batch of them runs."""

from agent_trainers.programs.environment_tools import EnvironmentTools
from agent_trainers.programs.program import Outcome, ProgramSession
from agent_trainers.programs.tasks import ProgramTasks

__all__ = ["EnvironmentTools", "Outcome", "ProgramSession", "ProgramTasks"]
