"""Gymnasium wrappers."""

from agent_envs.wrappers.actions import MenuActions, TokenActions
from agent_envs.wrappers.observations import (
    ConversationObservation,
    TokenObservation,
    render_messages,
)
from agent_envs.wrappers.potential_shaping import PotentialShaping, found_gold

__all__ = [
    "ConversationObservation",
    "MenuActions",
    "PotentialShaping",
    "TokenActions",
    "TokenObservation",
    "found_gold",
    "render_messages",
]
