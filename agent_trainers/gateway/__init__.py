"""The gateway: programs that talk to OpenAI's API play with our policies, and their calls are kept.

A session is one episode, a call to its URL one transition with the tokens that were sampled.
"""

from agent_trainers.gateway.gateway import Gateway
from agent_trainers.gateway.limits import SessionLimits
from agent_trainers.gateway.session import Session

__all__ = ["Gateway", "Session", "SessionLimits"]
