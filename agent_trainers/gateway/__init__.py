"""The gateway: OpenAI's and Anthropic's APIs in front of a policy, which records episodes.

A session is one episode, and a call to its URL is one transition with the sampled tokens.
"""

from agent_trainers.gateway.gateway import Gateway
from agent_trainers.gateway.session import Session, SessionLimits

__all__ = ["Gateway", "Session", "SessionLimits"]
