"""Agents that are programs: what they are given, what they return, and how a batch of them runs."""

from agent_trainers.programs.program import Outcome, ProgramSession

__all__ = ["Outcome", "ProgramSession"]
