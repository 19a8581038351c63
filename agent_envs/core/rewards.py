"""Rewards as sums of named terms: functions of the environment and the step, times their weights.

The contributions are in ``info["reward_terms"]`` and sum to the reward exactly. The default weights
never reward a detour: all solutions have the same return, less the cost of mistakes, and failures a
lower one. So a process term is either `Progress`, which every solution completes, or a cost that is
bounded over an episode. Each environment declares the `Earnings` of its terms.
"""

import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from agent_envs.core.lookup import lookup_or_import
from agent_envs.core.tool import ToolResult
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ParsedAction


class Call(NamedTuple):
    """A call of a turn, or the mistake in it, and its result; None for a mistake."""

    action: ParsedAction
    result: ToolResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step."""

    action: ParsedAction
    """The parsed turn; the first call of several."""
    result: ToolResult | None
    """The result of the tool, if one was called; that of the first call of several."""
    is_last: bool
    """Whether the episode ends here: an answer, or the last step the turn limit allows."""
    calls: Sequence[Call] = ()
    """Every call of the turn with its result, in order: pairs of action and result."""
    text: str = ""
    """The whole turn as the model wrote it."""
    info: dict[str, Any] = field(default_factory=dict)
    """Entries that terms add to ``info``."""


MAX_COUNTED_MISTAKES: Final = 10
"""Maximum number of mistakes with a cost in one episode."""


@dataclass(frozen=True, slots=True)
class Earnings:
    """Range of the sum of a term over an episode, before its weight."""

    solved: tuple[float, float]
    """Of an episode that solves its task."""
    unsolved: tuple[float, float]
    """Of any other."""


NOTHING: Final = Earnings((0.0, 0.0), (0.0, 0.0))
OUTCOME: Final = Earnings((1.0, 1.0), (0.0, 0.0))
SCORE: Final = Earnings((1.0, 1.0), (0.0, math.nextafter(1.0, 0.0)))  # a full score is a solution
PROGRESS: Final = Earnings((1.0, 1.0), (0.0, 1.0))
COST: Final = Earnings(*[(-float(MAX_COUNTED_MISTAKES), 0.0)] * 2)


class Progress:
    """Potential-based progress reward (Ng, Harada and Russell, 1999): each share is credited once.

    The sum over an episode is equal for all solutions, whatever their steps and their order.
    """

    def __init__(self, start: float = 0.0) -> None:
        """Set the share of the task that is done at the start, from 0 to 1; it is not credited."""
        self.best = self._start = start

    def advance(self, share: float) -> float:
        """Return the credit of a step after which `share` of the task is done; 1 is solved."""
        gain, self.best = max(0.0, share - self.best), max(share, self.best)
        return gain / (1.0 - self._start) if gain else 0.0


RewardFunction = Callable[[Any, StepEvent], float]
"""Takes the environment and the step; returns the term's value before its weight."""
Rewards = Mapping[str, float | tuple[RewardFunction, float]]
"""Weight of each term, by name or import path, or function and weight of a custom term."""


def choose_terms(
    rewards: Rewards, functions: Mapping[str, RewardFunction]
) -> dict[str, tuple[RewardFunction, float]]:
    """Return function and weight of each term of ``rewards=`` whose weight is not 0."""
    chosen: dict[str, tuple[RewardFunction, float]] = {}
    for name, given in rewards.items():
        if isinstance(given, Sequence) and len(given) == 2 and callable(given[0]):
            function, weight = given
        else:
            function, weight = lookup_or_import(functions, name, kind="reward term"), given
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise ConfigurationError(
                f"rewards[{name!r}] must be a finite number, or a function and one, not {given!r}."
            )
        if weight:
            short = name.rpartition(":")[2]
            if short in chosen:
                raise ConfigurationError(
                    f"rewards[{name!r}]: there is another term {short!r}. Rename the function."
                )
            chosen[short] = (function, float(weight))
    return chosen


def noted_terms(*names: str) -> dict[str, RewardFunction]:
    """Make terms with the values that the environment adds to ``env.noted`` in a step, or 0."""

    def term(env: Any, _: StepEvent, *, name: str) -> float:
        return float(env.noted.get(name, 0.0))

    return {name: functools.partial(term, name=name) for name in names}


def final_metric(name: str) -> RewardFunction:
    """Make a term with the value of a metric, at most 1, at the end of an episode, else 0."""
    return lambda env, event: min(1.0, float(env.metrics()[name])) if event.is_last else 0.0


def correct_term(env: Any, event: StepEvent) -> float:
    """Return 1 for a right answer, by the environment's ``is_correct``."""
    return float(env.is_correct) if event.action.kind == "answer" else 0.0


def format_term(env: Any, event: StepEvent) -> float:
    """Return -1 for each of the first `MAX_COUNTED_MISTAKES` mistakes, else 0."""
    if event.action.is_faultless or env.num_invalid_actions > MAX_COUNTED_MISTAKES:
        return 0.0
    return -1.0


def extra_call_term(env: Any, event: StepEvent) -> float:
    """Return -1 for each call beyond ``env.num_free_calls``, `MAX_COUNTED_MISTAKES` times."""
    results = [call.result for call in event.calls if call.result is not None]
    made = env.num_tool_calls - env.num_free_calls
    before = made - sum(result.error != "not_carried_out" for result in results)
    counted = [min(max(0, number), MAX_COUNTED_MISTAKES) for number in (before, made)]
    return float(counted[0] - counted[1])


def token_cost_term(env: Any, event: StepEvent) -> float:
    """Return the negative number of tokens of the turn, in thousands, at four bytes per token."""
    return -len(event.text.encode("utf-8", "replace")) / 4000


def earnings_of(
    weights: Mapping[str, float], earnings: Mapping[str, Earnings], *, solved: bool
) -> tuple[float, float]:
    """Return the range of the return for terms of these weights."""
    ranges = [
        sorted(weight * value for value in (term.solved if solved else term.unsolved))
        for weight, term in ((weight, earnings[name]) for name, weight in weights.items())
    ]
    return math.fsum(low for low, _ in ranges), math.fsum(high for _, high in ranges)


def compute_terms(
    env: Any, event: StepEvent, terms: Mapping[str, tuple[RewardFunction, float]]
) -> dict[str, float]:
    """Return the contribution of each term to the reward of a step."""
    contributions: dict[str, float] = {}
    for name, (function, weight) in terms.items():
        value: Any = None
        try:
            value = function(env, event)
            contributions[name] = weight * float(value)
        except Exception as error:
            error.add_note(f"of the reward term {name!r}, which returned {reprlib.repr(value)}")
            raise
        if not math.isfinite(contributions[name]):
            raise ValueError(f"The reward term {name!r} returned {value}; it must be finite.")
    return contributions
