"""Rewards as named terms: what a step earned, term by term.

A term is a function of the environment and of what happened in the step; a weight turns its value
into a contribution. Only terms with a weight other than 0 are computed. The contributions stand in
``info["reward_terms"]`` and sum to the reward exactly.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_envs.core.lookup import unknown_name_message
from agent_envs.core.tool import ToolResult
from agent_envs.core.tool_formats import ParsedAction
from agent_envs.errors import ConfigurationError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """What happened in one step."""

    action: ParsedAction
    """What was understood of the model's turn."""
    result: ToolResult | None
    """What the tool returned, if one was called."""
    is_last: bool
    """Whether the episode ends here: an answer, or the last step the turn limit allows."""


RewardFunction = Callable[[Any, StepEvent], float]


def check_weights(
    weights: Mapping[str, float], functions: Mapping[str, RewardFunction]
) -> dict[str, float]:
    """Return the weights that are not 0, as floats.

    Raises:
        UnknownNameError: If a term has no function; the message suggests the nearest.
        ConfigurationError: If a weight is not a finite number.
    """
    checked: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in functions:
            raise UnknownNameError(unknown_name_message(name, functions, kind="reward term"))
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigurationError(f"rewards[{name!r}] must be a number, not {weight!r}.")
        if not math.isfinite(weight):
            raise ConfigurationError(f"rewards[{name!r}] must be finite, not {weight}.")
        if weight:
            checked[name] = float(weight)
    return checked


def format_term(_: Any, event: StepEvent) -> float:
    """Return 1 for a well-formed action, -1 for a mistake."""
    return -1.0 if event.action.kind == "invalid" else 1.0
