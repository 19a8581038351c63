"""Policies: who acts. Each turns chat messages into one model turn."""

from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, Usage
from agent_trainers.policies.scripted import ScriptedPolicy

__all__ = ["Generation", "GenerationRequest", "Policy", "ScriptedPolicy", "Usage"]
