"""Gymnasium wrappers."""

from agent_envs.wrappers.observations import (
    ConversationObservation,
    MenuActions,
    TokenObservation,
    render_messages,
)
from agent_envs.wrappers.potential_shaping import PotentialShaping, found_gold

__all__ = [
    "ConversationObservation",
    "MenuActions",
    "PotentialShaping",
    "TokenObservation",
    "found_gold",
    "render_messages",
]
