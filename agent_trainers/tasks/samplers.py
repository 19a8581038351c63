"""Task samplers: which task a group gets next.

`TaskSampler` interleaves environments by weight and goes through the tasks of each in random
passes. The samplers of curricula change the weights by the success so far: `LevelSampler` goes
through environments from easy to hard, `ProgressSampler` prefers those whose success moves
(Matiisen et al., arXiv 1707.00183), `PoolSampler` prefers tasks that are sometimes solved.

Samplers are functions of the run's state alone: every process draws the same tasks, and a resumed
run those that the unbroken run would have drawn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError

PREFIX: Final = "curriculum"
_KEPT: Final = "curriculum/"  # key in a state; no environment's name has a slash
_POOLS: Final[Mapping[str, float]] = {"new": 4.0, "learning": 4.0, "hard": 1.0, "easy": 1.0}
# Names and weights. A task is hard if no episode of its newest group succeeded, easy if all did.
_FAST: Final = 0.3  # rates of the running means of success
_SLOW: Final = 0.05


class DrawnTask(NamedTuple):
    """Task of a group."""

    env: str
    """The name of the environment."""
    task: int
    """The index of the task in it."""


class GroupResult(NamedTuple):
    """Outcome of a group."""

    env: str
    """The name of the environment."""
    task: int
    """The index of the task in it."""
    success: float
    """The share of its episodes that succeeded, in [0, 1]; NaN where none was scorable."""
    has_variance: bool
    """Whether the returns of its episodes differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPool:
    """The tasks of one environment."""

    env: str
    """The name of the environment."""
    weight: float
    """Its share of the draws, relative to the others'."""
    tasks: Sequence[int] | None
    """Indices of the tasks; None where they are endless."""


class TaskSampler:
    """Draws environments by weight and the tasks of each in random passes.

    Environments are interleaved by smooth weighted round-robin: each earns its share per draw, and
    the one with the largest balance is drawn and pays 1. So every stretch of draws holds each
    environment's share up to one group. Tasks of an endless family are drawn at random.
    """

    def __init__(self, pools: Sequence[TaskPool], seed: int) -> None:
        """Draw from `pools`, whose order counts, by the seed of the run."""
        self.pools = list(pools)
        self._seed = seed
        self._balances = [0.0] * len(self.pools)
        self._num_drawn = [0] * len(self.pools)
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def draw(self, count: int) -> list[DrawnTask]:
        """Return the next `count` tasks."""
        return [self._next() for _ in range(count)]

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Update the sampler by the groups of a batch, in their order."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the next draws."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next draws, in plain types."""
        return {
            pool.env: {"gained": balance, "num_drawn": num_drawn}
            for pool, balance, num_drawn in zip(
                self.pools, self._balances, self._num_drawn, strict=True
            )
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; pools that it lacks start from 0."""
        known = [state.get(pool.env, {"gained": 0.0, "num_drawn": 0}) for pool in self.pools]
        self._balances = [pool["gained"] for pool in known]
        self._num_drawn = [pool["num_drawn"] for pool in known]

    def _shares(self) -> list[float]:
        """Return the factor of each pool's weight."""
        return [1.0] * len(self.pools)

    def _next(self) -> DrawnTask:
        weights = [
            pool.weight * share for pool, share in zip(self.pools, self._shares(), strict=True)
        ]
        total = sum(weights)
        for i, weight in enumerate(weights):
            self._balances[i] += weight / total
        drawn = max(range(len(self.pools)), key=lambda i: self._balances[i])
        self._balances[drawn] -= 1.0
        number = self._num_drawn[drawn]
        self._num_drawn[drawn] += 1
        return DrawnTask(self.pools[drawn].env, self._task(drawn, number))

    def _task(self, i: int, number: int) -> int:
        """Return the task of the draw `number` from the pool `i`."""
        tasks = self.pools[i].tasks
        if tasks is None:
            return int(np.random.default_rng([self._seed, i, number]).integers(ENDLESS))
        number_of_pass, place = divmod(number, len(tasks))
        if i not in self._orders or self._orders[i][0] != number_of_pass:
            rng = np.random.default_rng([self._seed, i, number_of_pass])
            self._orders[i] = number_of_pass, rng.permutation(len(tasks))
        return int(tasks[self._orders[i][1][place]])

    def _share_metrics(self) -> dict[str, float]:
        shares = zip(self.pools, self._shares(), strict=True)
        return {f"{PREFIX}/share/{pool.env}": share for pool, share in shares}


class _Curriculum(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    arguments: dict[str, list[Any]] = {}
    """Values of the environment's arguments, easy to hard; each row is an environment. Without
    them the curriculum selects among the environments of the run."""

    @property
    def levels(self) -> list[dict[str, Any]]:
        """The arguments of each level."""
        names = list(self.arguments)
        values = zip(*self.arguments.values(), strict=True)
        return [dict(zip(names, row, strict=True)) for row in values]


class Levels(_Curriculum):
    """The next environment begins when `target` of the last `groups` of the newest are solved."""

    kind: Literal["levels"]
    target: Annotated[float, Field(gt=0, le=1)] = 0.8
    groups: Annotated[int, Field(ge=1)] = 16
    review: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the draws that goes to earlier levels."""


class LearningProgress(_Curriculum):
    """Environments weigh by how much their success moves; `explore` is spread evenly."""

    kind: Literal["learning_progress"]
    explore: Annotated[float, Field(gt=0, le=1)] = 0.2


class Pools(_Curriculum):
    """Tasks weigh by the success of their last group."""

    kind: Literal["pools"]


Curriculum = Levels | LearningProgress | Pools
_CURRICULUM: TypeAdapter[Curriculum] = TypeAdapter(
    Annotated[Curriculum, Field(discriminator="kind")]
)


def parse_curriculum(value: str | Mapping[str, Any] | None) -> Curriculum | None:
    """Return a curriculum; None without one.

    Args:
        value: A kind, such as ``levels``, or JSON text or a mapping, ``{"kind": ..., ...}``.

    Raises:
        ConfigurationError: If it is malformed; names the field.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.lstrip().startswith("{") else {"kind": value}
        parsed = _CURRICULUM.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ": ".join(filter(None, ("curriculum", ".".join(map(str, first["loc"])))))
        raise ConfigurationError(f"{place}: {first['msg']}.") from None
    except ValueError as error:
        raise ConfigurationError(f"curriculum is not valid JSON ({error}).") from None
    lengths = {len(values) for values in parsed.arguments.values()}
    if len(lengths) > 1 or lengths & {0, 1}:
        raise ConfigurationError(
            "curriculum: arguments: each needs the same number of values, at least two, such as "
            '{"hops": [1, 2, 3]}.'
        )
    return parsed


def make_sampler(
    curriculum: Curriculum | None, pools: Sequence[TaskPool], seed: int
) -> TaskSampler:
    """Return the sampler of a curriculum, or the plain one without a curriculum.

    Raises:
        ConfigurationError: If the curriculum has nothing to select from.
    """
    if curriculum is None:
        return TaskSampler(pools, seed)
    if isinstance(curriculum, Pools):
        if endless := [pool.env or "the environment" for pool in pools if pool.tasks is None]:
            raise ConfigurationError(
                f"curriculum='pools' needs tasks that are drawn repeatedly, but those of "
                f"{endless[0]} are endless. Use 'levels' with arguments, such as "
                '{"hops": [1, 2, 3]}, or list its tasks.'
            )
        return PoolSampler(pools, seed)
    if len(pools) < 2:
        raise ConfigurationError(
            f"curriculum={curriculum.kind!r} needs several environments, easy to hard: list them "
            'in envs, or give the arguments of one: {"arguments": {"hops": [1, 2, 3]}, ...}.'
        )
    if isinstance(curriculum, Levels):
        return LevelSampler(curriculum, pools, seed)
    return ProgressSampler(curriculum, pools, seed)


class LevelSampler(TaskSampler):
    """Goes through environments in order; see `Levels`."""

    def __init__(self, settings: Levels, pools: Sequence[TaskPool], seed: int) -> None:
        """Start with the first of `pools`."""
        super().__init__(pools, seed)
        self._settings = settings
        self._level = 0
        self._newest: list[float] = []  # success of the last groups at the level

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Advance to the next level once the newest is solved often enough."""
        for result in results:
            if result.env != self.pools[self._level].env:
                continue
            self._newest = [*self._newest, result.success][-self._settings.groups :]
            is_full = len(self._newest) == self._settings.groups
            is_last = self._level + 1 == len(self.pools)
            if is_full and not is_last and np.mean(self._newest) >= self._settings.target:
                self._level, self._newest = self._level + 1, []

    def metrics(self) -> dict[str, float]:
        """Return the level, counted from 1, its success, and each environment's share."""
        metrics = {f"{PREFIX}/level": self._level + 1.0}
        if self._newest:
            metrics[f"{PREFIX}/success"] = float(np.mean(self._newest))
        return metrics | self._share_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next draws, in plain types."""
        return {**super().state_dict(), _KEPT: {"level": self._level, "newest": self._newest}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        super().load_state_dict(state)
        known = state.get(_KEPT, {"level": 0, "newest": []})
        self._level, self._newest = known["level"], list(known["newest"])

    def _shares(self) -> list[float]:
        review = self._settings.review / self._level if self._level else 0.0
        own = 1.0 - review * self._level
        return [*[review] * self._level, own, *[0.0] * (len(self.pools) - self._level - 1)]


class ProgressSampler(TaskSampler):
    """Weighs environments by the movement of their success; see `LearningProgress`."""

    def __init__(self, settings: LearningProgress, pools: Sequence[TaskPool], seed: int) -> None:
        """Start with equal weights."""
        super().__init__(pools, seed)
        self._settings = settings
        self._means: dict[str, list[float]] = {}  # fast and slow

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Update a fast and a slow running mean of each environment's success."""
        for result in results:
            fast, slow = self._means.get(result.env, [result.success, result.success])
            self._means[result.env] = [
                fast + _FAST * (result.success - fast),
                slow + _SLOW * (result.success - slow),
            ]

    def metrics(self) -> dict[str, float]:
        """Return each environment's progress and share."""
        means = self._means.items()
        progress = {f"{PREFIX}/progress/{env}": fast - slow for env, (fast, slow) in means}
        return progress | self._share_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next draws, in plain types."""
        return {**super().state_dict(), _KEPT: {env: list(own) for env, own in self._means.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        super().load_state_dict(state)
        self._means = {env: list(means) for env, means in state.get(_KEPT, {}).items()}

    def _shares(self) -> list[float]:
        means = [self._means.get(pool.env, [0.0, 0.0]) for pool in self.pools]
        progress = np.array([abs(fast - slow) for fast, slow in means])
        even = np.full(len(self.pools), 1.0 / len(self.pools))
        moved = progress / progress.sum() if progress.sum() > 0 else even
        explore = self._settings.explore
        shares: list[float] = (explore * even + (1.0 - explore) * moved).tolist()
        return shares


class PoolSampler(TaskSampler):
    """Weighs tasks by the success of their last group; see `Pools`."""

    def __init__(self, pools: Sequence[TaskPool], seed: int) -> None:
        """Start with new tasks only; no pool may be endless."""
        super().__init__(pools, seed)
        self._kinds = [np.zeros(len(pool.tasks or ()), np.int8) for pool in pools]
        self._places = [{task: i for i, task in enumerate(pool.tasks or ())} for pool in pools]
        self._in_batch: set[tuple[int, int]] = set()

    def draw(self, count: int) -> list[DrawnTask]:
        """Return the next `count` tasks, without repetition where there are enough."""
        self._in_batch.clear()
        return super().draw(count)

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Move each task to the pool of its success."""
        numbers = {pool.env: i for i, pool in enumerate(self.pools)}
        for result in results:
            is_mixed = 0 < result.success < 1
            name = "learning" if is_mixed else "easy" if result.success > 0 else "hard"
            i = numbers[result.env]
            self._kinds[i][self._places[i][result.task]] = list(_POOLS).index(name)

    def metrics(self) -> dict[str, float]:
        """Return the number of tasks in each pool."""
        kinds = np.concatenate(self._kinds)
        return {
            f"{PREFIX}/tasks/{name}": float((kinds == k).sum()) for k, name in enumerate(_POOLS)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next draws, in plain types."""
        return {**super().state_dict(), _KEPT: [kinds.tolist() for kinds in self._kinds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        super().load_state_dict(state)
        if _KEPT in state:
            self._kinds = [np.array(kinds, np.int8) for kinds in state[_KEPT]]

    def _task(self, i: int, number: int) -> int:
        """Return the task of the draw `number` from the environment `i`."""
        rng = np.random.default_rng([self._seed, i, number])
        kinds = self._kinds[i]
        is_free = np.ones(len(kinds), bool)
        drawn = [place for env, place in self._in_batch if env == i]
        if len(drawn) < len(kinds):
            is_free[drawn] = False
        weights = np.array(list(_POOLS.values())) * [
            bool((is_free & (kinds == k)).any()) for k in range(len(_POOLS))
        ]
        kind = rng.choice(len(weights), p=weights / weights.sum())
        candidates: npt.NDArray[np.int64] = np.flatnonzero(is_free & (kinds == kind))
        place = int(rng.choice(candidates))
        self._in_batch.add((i, place))
        return int((self.pools[i].tasks or ())[place])
