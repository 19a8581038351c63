"""Policies map chat messages to one model turn."""

from agent_trainers.policies.generation import Generation, GenerationRequest, Usage
from agent_trainers.policies.policy import Policy, PolicyWrapper
from agent_trainers.policies.scripted import ScriptedPolicy

__all__ = ["Generation", "GenerationRequest", "Policy", "PolicyWrapper", "ScriptedPolicy", "Usage"]
