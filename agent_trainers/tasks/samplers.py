"""Task samplers: which task a group gets next.

`TaskSampler` interleaves environments by weight and goes through the tasks of each in random
passes. A curriculum changes the weights by the success so far.

Samplers are functions of the run's state alone: every process draws the same tasks, and a resumed
run those that the unbroken run would have drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_envs.core.command_line import json_object, refusal
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError


class DrawnTask(NamedTuple):
    """Task of a group: the name of its environment, and its index there."""

    env: str
    task: int


class GroupResult(NamedTuple):
    """Outcome of a group."""

    env: str
    success: float
    """The share of its episodes that succeeded, in [0, 1]; NaN where none was scorable."""
    has_variance: bool
    """Whether the returns of its episodes differ."""


class TaskPool(NamedTuple):
    """The tasks of one environment."""

    env: str
    """The name of the environment."""
    weight: float
    """Its share of the draws, relative to the others'."""
    tasks: Sequence[int] | None
    """Indices of the tasks; None where they are endless."""


class Curriculum(BaseModel):
    """Selects environments by the success so far."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["levels"]
    """The next environment of the run begins when the newest is solved."""
    target: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Success in the last `groups` groups of a level at which the next begins."""
    groups: Annotated[int, Field(ge=1)] = 16
    review: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the draws that goes to earlier levels."""


def parse_curriculum(value: str | Mapping[str, Any] | None) -> Curriculum | None:
    """Return the curriculum, if any, of a kind (``levels``), JSON text or ``{"kind": ..., ...}``.

    Raises:
        ConfigurationError: If it is malformed; names the field.
    """
    if value is None:
        return None
    if isinstance(value, str):
        is_json = value.lstrip().startswith("{")
        value = json_object(value, "curriculum") if is_json else {"kind": value}
    try:
        return Curriculum.model_validate(value)
    except ValidationError as error:
        raise refusal("curriculum", error) from None


class TaskSampler:
    """Draws environments by weight and the tasks of each in random passes.

    Environments are interleaved by smooth weighted round-robin: each earns its share per draw, and
    the one with the largest balance is drawn and pays 1. So every stretch of draws holds each
    environment's share up to one group. Tasks of an endless family are drawn at random.

    A curriculum goes through the environments in order, with reviews of earlier ones.
    """

    def __init__(
        self, pools: Sequence[TaskPool], seed: int, curriculum: Curriculum | None = None
    ) -> None:
        """Draw from `pools`, whose order counts, by the seed of the run.

        Raises:
            ConfigurationError: If a curriculum has nothing to select from, or pools have weights.
        """
        if curriculum is not None and len(pools) < 2:
            raise ConfigurationError(
                "curriculum='levels' needs several environments: list them in envs, easy to hard."
            )
        if curriculum is not None and len({pool.weight for pool in pools}) > 1:
            raise ConfigurationError(
                "weight does nothing with curriculum='levels', which sets the shares of the "
                "environments. Leave it out."
            )
        self.pools = list(pools)
        self._seed, self._curriculum = seed, curriculum
        self._balances = [0.0] * len(self.pools)
        self._num_drawn = [0] * len(self.pools)
        self._level = 0
        self._newest: list[float] = []  # success of the last groups at the level

    def draw(self, count: int) -> list[DrawnTask]:
        """Return the next `count` tasks."""
        shares = zip(self.pools, self._shares(), strict=True)
        weights = [pool.weight * share for pool, share in shares]
        total = sum(weights)
        drawn = []
        for _ in range(count):
            self._balances = [b + w / total for b, w in zip(self._balances, weights, strict=True)]
            i = int(np.argmax(self._balances))
            self._balances[i] -= 1.0
            drawn.append(DrawnTask(self.pools[i].env, self._task(i, self._num_drawn[i])))
            self._num_drawn[i] += 1
        return drawn

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Advance to the next level once the newest is solved often enough."""
        if self._curriculum is None:
            return
        for result in results:
            if result.env != self.pools[self._level].env:
                continue
            self._newest = [*self._newest, result.success][-self._curriculum.groups :]
            is_full = len(self._newest) == self._curriculum.groups
            is_last = self._level + 1 == len(self.pools)
            if is_full and not is_last and np.mean(self._newest) >= self._curriculum.target:
                self._level, self._newest = self._level + 1, []

    def metrics(self) -> dict[str, float]:
        """Return a curriculum's level, counted from 1, its success and the environments' shares."""
        if self._curriculum is None:
            return {}
        metrics = {"curriculum/level": self._level + 1.0}
        if self._newest:
            metrics["curriculum/success"] = float(np.mean(self._newest))
        shares = zip(self.pools, self._shares(), strict=True)
        return metrics | {f"curriculum/share/{pool.env}": share for pool, share in shares}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next draws, in plain types."""
        names = [pool.env for pool in self.pools]
        return {
            "balances": dict(zip(names, self._balances, strict=True)),
            "num_drawn": dict(zip(names, self._num_drawn, strict=True)),
            "level": self._level,
            "newest": list(self._newest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; pools that it lacks start from 0."""
        self._balances = [state["balances"].get(pool.env, 0.0) for pool in self.pools]
        self._num_drawn = [state["num_drawn"].get(pool.env, 0) for pool in self.pools]
        self._level, self._newest = state["level"], list(state["newest"])

    def _shares(self) -> list[float]:
        if self._curriculum is None:
            return [1.0] * len(self.pools)
        review = self._curriculum.review / self._level if self._level else 0.0
        own = 1.0 - review * self._level
        return [*[review] * self._level, own, *[0.0] * (len(self.pools) - self._level - 1)]

    def _task(self, i: int, number: int) -> int:
        tasks = self.pools[i].tasks
        if tasks is None:
            return int(np.random.default_rng([self._seed, i, number]).integers(ENDLESS))
        number_of_pass, place = divmod(number, len(tasks))
        rng = np.random.default_rng([self._seed, i, number_of_pass])
        return int(tasks[rng.permutation(len(tasks))[place]])
