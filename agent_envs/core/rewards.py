"""Rewards as named terms: what a step earned, term by term.

A term is a function of the environment and of what happened in the step; a weight turns its value
into a contribution. Only terms with a weight other than 0 are computed. The contributions stand in
``info["reward_terms"]`` and sum to the reward exactly.
"""

import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_envs.core.lookup import lookup
from agent_envs.core.tool import ToolResult
from agent_envs.core.tool_calls import Call
from agent_envs.core.tool_formats import ParsedAction
from agent_envs.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """What happened in one step."""

    action: ParsedAction
    """What was understood of the model's turn; the first call of several."""
    result: ToolResult | None
    """What the tool returned, if one was called; that of the first call of several."""
    is_last: bool
    """Whether the episode ends here: an answer, or the last step the turn limit allows."""
    calls: Sequence[Call] = ()
    """Every call of the turn with its result, in order: pairs of action and result."""


RewardFunction = Callable[[Any, StepEvent], float]
"""Takes the environment and the step; returns the term's value before its weight."""
Rewards = Mapping[str, float | tuple[RewardFunction, float]]
"""Weight of each term, or function and weight of a term of one's own."""


def choose_terms(
    rewards: Rewards, functions: Mapping[str, RewardFunction]
) -> dict[str, tuple[RewardFunction, float]]:
    """Return function and weight of each term whose weight is not 0.

    Args:
        rewards: What an environment's ``rewards=`` asks for.
        functions: The terms that have a name.

    Raises:
        UnknownNameError: If a term has no function; the message suggests the nearest.
        ConfigurationError: If a weight is not a finite number.
    """
    chosen: dict[str, tuple[RewardFunction, float]] = {}
    for name, given in rewards.items():
        if isinstance(given, Sequence) and len(given) == 2 and callable(given[0]):
            function, weight = given
        else:
            function, weight = lookup(functions, name, kind="reward term"), given
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigurationError(
                f"rewards[{name!r}] must be a number, or a function and a number, not {given!r}."
            )
        if not math.isfinite(weight):
            raise ConfigurationError(f"rewards[{name!r}] must be finite, not {weight}.")
        if weight:
            chosen[name] = (function, float(weight))
    return chosen


def noted_terms(*names: str) -> dict[str, RewardFunction]:
    """Make terms that are what the environment put into ``env.noted`` in this step, or 0."""

    def term(env: Any, _: StepEvent, *, name: str) -> float:
        return float(env.noted.get(name, 0.0))

    return {name: functools.partial(term, name=name) for name in names}


def correct_term(env: Any, event: StepEvent) -> float:
    """Return 1 for a right answer, by the environment's ``is_correct``; outcome."""
    return float(env.is_correct) if event.action.kind == "answer" else 0.0


def format_term(_: Any, event: StepEvent) -> float:
    """Return 1 for a well-formed action, -1 for a mistake."""
    return 1.0 if event.action.is_faultless else -1.0


def earned(
    env: Any, event: StepEvent, terms: Mapping[str, tuple[RewardFunction, float]]
) -> dict[str, float]:
    """Return what each term contributes to the reward of a step.

    Raises:
        TypeError: If a term returns no number; names the term.
        ValueError: If it returns NaN or an infinite one.
    """
    contributions: dict[str, float] = {}
    for name, (function, weight) in terms.items():
        try:
            value = function(env, event)
        except Exception as error:
            error.add_note(f"raised by the reward term {name!r}")
            raise
        try:
            contributions[name] = weight * float(value)
        except (TypeError, ValueError):
            said = f"The reward term {name!r} returned {reprlib.repr(value)}; it must be a number."
            raise TypeError(said) from None
        if not math.isfinite(contributions[name]):
            raise ValueError(f"The reward term {name!r} returned {value}; it must be finite.")
    return contributions
