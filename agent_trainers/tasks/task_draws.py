"""Which task comes next where several environments are played by weight.

A function of the run's state, and of nothing else: every process draws the same tasks, and a
resumed run those that the unbroken run would have drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agent_envs.core.tool_env import ENDLESS


class DrawnTask(NamedTuple):
    """What a group is to play."""

    env: str
    """The name of the environment."""
    task: int
    """The index of the task in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPool:
    """The tasks of one environment."""

    env: str
    """The name of the environment."""
    weight: float
    """Its share of the draws, as against the others'."""
    tasks: Sequence[int] | None
    """Indices of the tasks; None where they are endless."""


class TaskDraws:
    """Draws tasks: environments in turn by weight, tasks of each in random passes.

    The turn is smooth weighted round-robin: each environment gains its share of a draw, and the one
    that has gained most is drawn and pays one. So every stretch of draws, and with it every batch,
    holds each environment's share up to one group. The tasks of a finite pool come in a random
    order, all of them before any comes again; those of an endless family are drawn at random.
    """

    def __init__(self, pools: Sequence[TaskPool], seed: int) -> None:
        """Draw from `pools`, whose order counts, by the seed of the run."""
        self._pools = list(pools)
        self._seed = seed
        self._gained = [0.0] * len(self._pools)
        self._num_drawn = [0] * len(self._pools)
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def draw(self, count: int) -> list[DrawnTask]:
        """Return the next `count` tasks."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draws depend on, in plain types."""
        return {
            pool.env: {"gained": gained, "num_drawn": num_drawn}
            for pool, gained, num_drawn in zip(
                self._pools, self._gained, self._num_drawn, strict=True
            )
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; pools that it does not know begin anew."""
        known = [state.get(pool.env, {"gained": 0.0, "num_drawn": 0}) for pool in self._pools]
        self._gained = [pool["gained"] for pool in known]
        self._num_drawn = [pool["num_drawn"] for pool in known]

    def _next(self) -> DrawnTask:
        total = sum(pool.weight for pool in self._pools)
        for i, pool in enumerate(self._pools):
            self._gained[i] += pool.weight / total
        drawn = max(range(len(self._pools)), key=lambda i: self._gained[i])
        self._gained[drawn] -= 1.0
        number = self._num_drawn[drawn]
        self._num_drawn[drawn] += 1
        return DrawnTask(self._pools[drawn].env, self._task(drawn, number))

    def _task(self, i: int, number: int) -> int:
        """Return the task of the draw `number` from the pool `i`."""
        tasks = self._pools[i].tasks
        if tasks is None:
            return int(np.random.default_rng([self._seed, i, number]).integers(ENDLESS))
        number_of_pass, place = divmod(number, len(tasks))
        if i not in self._orders or self._orders[i][0] != number_of_pass:
            rng = np.random.default_rng([self._seed, i, number_of_pass])
            self._orders[i] = number_of_pass, rng.permutation(len(tasks))
        return int(tasks[self._orders[i][1][place]])
