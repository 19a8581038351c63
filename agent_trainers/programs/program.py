"""The interface of programs: their session, their outcome, and how it becomes a reward.

A program is a function, ``run(session, task)``, plain or ``async``. It calls the model at
``session.base_url`` with ``session.key``, like any OpenAI-compatible server, and returns a reward.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import pydantic

from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError
from agent_envs.scoring import exact_match, f1
from agent_envs.scoring.math_answers import math_equal
from agent_trainers.trajectory import ROLE_NAME

Program = Callable[["ProgramSession", dict[str, Any]], Any]
ScoreAnswer = Callable[[dict[str, Any], Any], Any]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return float(value) if isinstance(value, bool) else value


Number = Annotated[pydantic.FiniteFloat, pydantic.Strict(), pydantic.BeforeValidator(_plain)]
"""A finite number, numpy's and booleans included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an episode."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")

    reward: Number | Annotated[Mapping[str, Number], pydantic.Field(min_length=1)]
    """The reward of the whole episode, shared by all roles; or one reward per role, by name."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """Metrics; ``success`` defaults to whether the reward is above 0."""
    truncated: bool = False
    """Whether a turn limit cut the episode off: a critic then estimates the value of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSession:
    """The endpoint of one episode's model."""

    base_url: str
    """The URL of the endpoint, as OpenAI's clients take it."""
    key: str
    """The key of this episode."""
    seed: int
    """A seed for the program's own draws; the same whenever the episode is repeated."""

    def role(self, name: str) -> "ProgramSession":
        """Return the endpoint of a role, whose key is the session's followed by ``.name``."""
        check_role(name)
        return replace(self, key=f"{self.key.partition('.')[0]}.{name}")


def check_role(name: str) -> None:
    """Check the name of a role."""
    if ROLE_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"Invalid role name {name!r}: use a letter, then at most 63 letters, digits, '_' and "
            "'-'."
        )


def find_program(name: str) -> Program:
    """Return the function of an import path, ``"my_agent:run"``."""
    program: Program = lookup_or_import({}, name, kind="program")
    return program


def find_reward(name: str) -> ScoreAnswer:
    """Return one of `REWARDS`, or the function of an import path."""
    return lookup_or_import(REWARDS, name, kind="reward")


_OUTCOME: Final = pydantic.TypeAdapter(Outcome)


def read_outcome(value: Any) -> Outcome:
    """Validate the return value of a program or a reward function.

    It is an `Outcome`, a number, or a mapping ``{"reward": 1.0, "metrics": {...}}``.
    """
    if isinstance(value, Outcome):
        value = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    elif not isinstance(value, Mapping):
        value = {"reward": value}
    try:
        outcome = _OUTCOME.validate_python(dict(value))
    except pydantic.ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise TypeError(
            f"{reprlib.repr(value)} is no outcome ({where}: {error.errors()[0]['msg']}); a program "
            "returns a finite number, or Outcome(reward, metrics). If it returns an answer, name "
            "the function that scores it with --reward."
        ) from None
    reward = outcome.reward
    total = sum(reward.values()) if isinstance(reward, Mapping) else reward
    return replace(outcome, metrics={"success": float(total > 0.0), **outcome.metrics})


def _golds(task: Mapping[str, Any]) -> list[str]:
    golds = task.get("answers", task.get("answer"))
    golds = [golds] if isinstance(golds, str | int | float) else golds
    if not isinstance(golds, list | tuple) or not golds:
        raise KeyError("the task has neither 'answer' nor 'answers', which the reward needs.")
    return [str(gold) for gold in golds]


def _score_exact_match(task: Mapping[str, Any], answer: Any) -> float:
    return exact_match(str("" if answer is None else answer), _golds(task))


def _score_f1(task: Mapping[str, Any], answer: Any) -> Outcome:
    exact = _score_exact_match(task, answer)
    overlap = f1(str("" if answer is None else answer), _golds(task))
    return Outcome(reward=overlap, metrics={"success": exact, "exact_match": exact})


def _score_math(task: Mapping[str, Any], answer: Any) -> float:
    text = str("" if answer is None else answer)
    return float(any(math_equal(text, gold) for gold in _golds(task)))


REWARDS: Final[Mapping[str, ScoreAnswer]] = {
    "exact_match": _score_exact_match,
    "f1": _score_f1,
    "math": _score_math,
}
"""Rewards for programs that return an answer; the task holds ``answer`` or a list ``answers``."""
