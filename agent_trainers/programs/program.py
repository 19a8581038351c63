"""What a program is given, what it returns, and how that becomes a reward.

A program is a function, ``run(session, task)``, plain or ``async``; it talks to the model at
``session.base_url`` with ``session.key``, as to any OpenAI-compatible server, and returns a reward.
"""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError
from agent_envs.scoring import exact_match, f1
from agent_envs.scoring.math_answers import math_equal
from agent_trainers.trajectory import ROLE_NAME

Program = Callable[["ProgramSession", dict[str, Any]], Any]
ScoreAnswer = Callable[[dict[str, Any], Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an episode."""

    reward: float | Mapping[str, float]
    """The reward of the whole episode, which all roles share; or each role's own, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured; ``success`` is whether the reward is above 0, unless it is given."""
    actions: Sequence[str] = ()
    """The turns that were taken in one of our environments, for whoever plays them again."""
    truncated: bool = False
    """Whether a turn limit cut the episode off, and it might have gone on: with a critic, its last
    state keeps its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSession:
    """What a program knows of its episode: where its model is."""

    base_url: str
    """The URL of the endpoint, as OpenAI's clients take it."""
    key: str
    """The key of this episode; no other one opens it."""
    seed: int
    """A number for draws of the program's own: the same whenever the episode is played again."""

    def role(self, name: str) -> "ProgramSession":
        """Return the endpoint of a role: what is asked there is the role's doing.

        Its key is the session's with ``.name`` after it, so a program in any language can write it.

        Raises:
            ConfigurationError: If the name is more than letters, digits, ``_`` and ``-``.
        """
        check_role(name)
        key = f"{self.key.partition('.')[0]}.{name}"
        return ProgramSession(base_url=self.base_url, key=key, seed=self.seed)


def check_role(name: str) -> None:
    """Check that something can be the name of a role.

    Raises:
        ConfigurationError: If it cannot.
    """
    if ROLE_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            "A role's name is a letter, then at most 63 letters, digits, '_' and '-'; not "
            f"{name!r}."
        )


def find_program(name: str) -> Program:
    """Return the function of an import path, ``"my_agent:run"``.

    Raises:
        UnknownNameError: If there is none.
        ConfigurationError: If it cannot be called with a session and a task.
    """
    program: Program = lookup_or_import({}, name, kind="program")
    _check_takes(program, name, "(session, task)")
    return program


def find_reward(name: str) -> ScoreAnswer:
    """Return one of `REWARDS`, or the function of an import path.

    Raises:
        UnknownNameError: If there is none.
        ConfigurationError: If it cannot be called with a task and an answer.
    """
    reward = lookup_or_import(REWARDS, name, kind="reward")
    _check_takes(reward, name, "(task, answer)")
    return reward


def read_outcome(value: Any) -> Outcome:
    """Return what a program, or a reward function, returned as an outcome with checked numbers.

    It is an `Outcome`, a number, or its members as JSON has them: ``{"reward": 1.0, "metrics":
    {...}}``.

    Raises:
        TypeError: If it is none; says what it is, and what it must be.
    """
    if isinstance(value, Mapping) and "reward" in value and not set(value) - _FIELDS:
        members = {name: value[name] for name in ("reward", "truncated") if name in value}
        value = Outcome(**members, metrics=value.get("metrics") or {})
    elif not isinstance(value, Outcome):
        value = Outcome(reward=_number(value, "the reward"))
    outcome: Outcome = value
    reward: float | dict[str, float]
    if isinstance(outcome.reward, Mapping) and outcome.reward:
        reward = _numbers(outcome.reward, "reward")
        total = sum(reward.values())
    else:
        total = reward = _number(outcome.reward, "the reward")
    metrics = _numbers(outcome.metrics, "metrics")
    if not isinstance(outcome.truncated, bool | np.bool_):
        raise TypeError(
            f"truncated is {reprlib.repr(outcome.truncated)}; it must be true or false."
        )
    return Outcome(
        reward=reward,
        metrics={"success": float(total > 0.0), **metrics},
        truncated=bool(outcome.truncated),
    )


_FIELDS: Final = frozenset({"reward", "metrics", "actions", "truncated"})


def _numbers(values: Any, name: str) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{name} is {reprlib.repr(values)}; it must map names to finite numbers.")
    return {key: _number(value, f"{name}[{key!r}]") for key, value in values.items()}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool | int | float | np.number | np.bool_):
        try:
            if math.isfinite(number := float(value)):
                return number
        except (OverflowError, TypeError):  # too large for a float; complex
            pass
    raise TypeError(
        f"{name} is {reprlib.repr(value)}; a program returns a finite number, or Outcome(reward, "
        "metrics). Where it returns an answer, name the function that scores it: --reward."
    )


def _check_takes(function: Any, name: str, parameters: str) -> None:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name} must be a function that is called with {parameters}: {error}."
        ) from None


def _golds(task: Mapping[str, Any]) -> list[str]:
    golds = task.get("answers", task.get("answer"))
    golds = [golds] if isinstance(golds, str | int | float) else golds
    if not isinstance(golds, list | tuple) or not golds:
        raise KeyError(
            f"the task has neither 'answer' nor 'answers' (found: {', '.join(task)}), which the "
            "reward needs."
        )
    return [str(gold) for gold in golds]


def _text(answer: Any) -> str:
    return "" if answer is None else str(answer)


def _score_exact_match(task: Mapping[str, Any], answer: Any) -> float:
    return exact_match(_text(answer), _golds(task))


def _score_f1(task: Mapping[str, Any], answer: Any) -> Outcome:
    golds = _golds(task)
    exact = exact_match(_text(answer), golds)
    overlap = f1(_text(answer), golds)
    return Outcome(reward=overlap, metrics={"success": exact, "exact_match": exact})


def _score_math(task: Mapping[str, Any], answer: Any) -> float:
    return float(any(math_equal(_text(answer), gold) for gold in _golds(task)))


REWARDS: Final[Mapping[str, ScoreAnswer]] = {
    "exact_match": _score_exact_match,
    "f1": _score_f1,
    "math": _score_math,
}
"""Rewards for programs that return an answer; the task holds ``answer``, or a list, ``answers``."""
