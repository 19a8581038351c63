"""Rewards as named terms: what a step earned, term by term.

A term is a function of the environment and of what happened in the step; a weight turns its value
into a contribution. Only terms with a weight other than 0 are computed. The contributions stand in
``info["reward_terms"]`` and sum to the reward exactly.

The default weights of the environments here never pay for a detour: whatever leads to a solution
earns the same, less what mistakes cost, and what fails earns less. So a term on the way is either
`Progress`, which a solution completes in any case, or a cost that is bounded over an episode; and
each environment declares the `Earnings` of its terms.
"""

import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.core.tool import ToolResult
from agent_envs.core.tool_calls import Call
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ParsedAction


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
    text: str = ""
    """The whole turn as the model wrote it."""


MAX_COUNTED_MISTAKES: Final = 10
"""How many mistakes of a kind cost something in one episode, however long it is."""


@dataclass(frozen=True, slots=True)
class Earnings:
    """What the values of a term can sum to in an episode, before its weight: least and most."""

    solved: tuple[float, float]
    """In an episode that solves its task."""
    unsolved: tuple[float, float]
    """In any other."""


NOTHING: Final = Earnings((0.0, 0.0), (0.0, 0.0))
OUTCOME: Final = Earnings((1.0, 1.0), (0.0, 0.0))
SCORE: Final = Earnings((1.0, 1.0), (0.0, math.nextafter(1.0, 0.0)))  # a full score is a solution
PROGRESS: Final = Earnings((1.0, 1.0), (0.0, 1.0))
COST: Final = Earnings(*[(-float(MAX_COUNTED_MISTAKES), 0.0)] * 2)


class Progress:
    """How far an episode has come with its task: credited once, and whole for a solution.

    It is a potential (Ng, Harada and Russell, 1999) that only grows: what an episode earns by it
    depends on how far it came, not on the number of steps nor on their order, and all solutions
    earn the same.
    """

    def __init__(self, start: float = 0.0) -> None:
        """Begin with what is done already, from 0 to 1: it earns nothing."""
        self.best = self._start = start

    def advance(self, share: float) -> float:
        """Return what a step earns that leaves `share` of the task done, 1 where it solves it.

        What all steps of an episode earn sums to 0 at least, and to 1 at most.
        """
        gain, self.best = max(0.0, share - self.best), max(share, self.best)
        return gain / (1.0 - self._start) if gain else 0.0


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


def format_term(env: Any, event: StepEvent) -> float:
    """Return -1 for a mistake, of which `MAX_COUNTED_MISTAKES` count; 0 for what is well-formed."""
    if event.action.is_faultless or env.num_invalid_actions > MAX_COUNTED_MISTAKES:
        return 0.0
    return -1.0


def earnings_of(
    weights: Mapping[str, float], earnings: Mapping[str, Earnings], *, solved: bool
) -> tuple[float, float]:
    """Return the least and the most that an episode can earn by terms of these weights."""
    ranges = [
        sorted(weight * value for value in (term.solved if solved else term.unsolved))
        for weight, term in ((weight, earnings[name]) for name, weight in weights.items())
    ]
    return math.fsum(low for low, _ in ranges), math.fsum(high for _, high in ranges)


def compute_terms(
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
