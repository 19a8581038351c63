"""Policies map chat messages to one model turn."""

from agent_trainers.policies.policy import (
    Generation,
    GenerationRequest,
    Policy,
    PolicyWrapper,
    ScriptedPolicy,
    Usage,
)

__all__ = ["Generation", "GenerationRequest", "Policy", "PolicyWrapper", "ScriptedPolicy", "Usage"]
