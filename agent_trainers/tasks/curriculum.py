"""Curricula: which task comes next follows what was solved so far.

Three kinds. ``levels``: environments in order, easy to hard; the next begins when the newest is
solved often enough. ``learning_progress``: of several environments, those are played more whose
success moves, up or down (Matiisen et al., arXiv 1707.00183). ``pools``: of an environment's tasks,
those are played more that are solved at times; a task moves between pools with its success.

Each is a `TaskDraws` whose draws depend on the results that it was told of, and on nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agent_envs.errors import ConfigurationError
from agent_trainers.tasks.task_draws import TaskDraws, TaskPool

PREFIX: Final = "curriculum"
_KEPT: Final = "curriculum/"  # in a state; no environment's name has a slash
_SOLVED_AT_TIMES: Final = "learning"
_POOLS: Final[Mapping[str, float]] = {"new": 4.0, _SOLVED_AT_TIMES: 4.0, "hard": 1.0, "easy": 1.0}
# Names and weights: a task is new until it was played, hard if no episode of its newest group
# succeeded, easy if all did.
_FAST: Final = 0.3  # what the newest group counts in a running mean of success
_SLOW: Final = 0.05


class GroupResult(NamedTuple):
    """What came of a group."""

    env: str
    """The name of the environment."""
    task: int
    """The index of the task in it."""
    success: float
    """The share of its episodes that succeeded, in [0, 1]; NaN where none could be scored."""
    has_variance: bool
    """Whether its episodes earned different returns: else there is nothing to compare."""


class _Curriculum(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    arguments: dict[str, list[Any]] = {}
    """Values of the environment's arguments, easy to hard; without them the environments of the
    run are what is chosen from."""

    @property
    def levels(self) -> list[dict[str, Any]]:
        """The arguments of each level."""
        names = list(self.arguments)
        values = zip(*self.arguments.values(), strict=True)
        return [dict(zip(names, row, strict=True)) for row in values]


class Levels(_Curriculum):
    """The next environment begins when the newest is solved in `target` of its last `groups`."""

    kind: Literal["levels"]
    target: Annotated[float, Field(gt=0, le=1)] = 0.8
    groups: Annotated[int, Field(ge=1)] = 16
    review: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the draws that goes to earlier levels."""


class LearningProgress(_Curriculum):
    """Environments are played by how much their success moves; `explore` goes to all alike."""

    kind: Literal["learning_progress"]
    explore: Annotated[float, Field(gt=0, le=1)] = 0.2


class Pools(_Curriculum):
    """Tasks are played by the success of their last group."""

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
            "curriculum: arguments: each needs as many values as the others, and two at least, "
            'such as {"hops": [1, 2, 3]}.'
        )
    return parsed


def curriculum_draws(
    curriculum: Curriculum, pools: Sequence[TaskPool], seed: int
) -> "CurriculumDraws":
    """Return the draws of a curriculum.

    Raises:
        ConfigurationError: If it has nothing to choose from.
    """
    if isinstance(curriculum, Pools):
        if endless := [pool.env or "the environment" for pool in pools if pool.tasks is None]:
            raise ConfigurationError(
                f"curriculum='pools' needs tasks that come again, and those of {endless[0]} are "
                "endless. Use 'levels' with arguments, such as {\"hops\": [1, 2, 3]}, or name "
                "its tasks."
            )
        return PoolDraws(pools, seed)
    if len(pools) < 2:
        raise ConfigurationError(
            f"curriculum={curriculum.kind!r} needs several environments, easy to hard: give them "
            'in envs, or the arguments of one: {"arguments": {"hops": [1, 2, 3]}, ...}.'
        )
    if isinstance(curriculum, Levels):
        return LevelDraws(curriculum, pools, seed)
    return ProgressDraws(curriculum, pools, seed)


class CurriculumDraws(TaskDraws):
    """Draws that follow the results."""

    def __init__(self, pools: Sequence[TaskPool], seed: int) -> None:
        """Draw from `pools` by the seed of the run."""
        super().__init__(pools, seed)
        self.pools = list(pools)

    def weigh(self, shares: Sequence[float]) -> None:
        """Draw each environment from now on by its weight times its share."""
        self._pools = [
            replace(pool, weight=pool.weight * share)
            for pool, share in zip(self.pools, shares, strict=True)
        ]

    def note(self, results: Sequence[GroupResult]) -> None:
        """Take in the groups of a batch, in their order."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return what is to be logged of the next draws."""
        raise NotImplementedError


class LevelDraws(CurriculumDraws):
    """Environments in order; see `Levels`."""

    def __init__(self, settings: Levels, pools: Sequence[TaskPool], seed: int) -> None:
        """Begin with the first of `pools`."""
        super().__init__(pools, seed)
        self._settings = settings
        self._level = 0
        self._newest: list[float] = []  # success of the last groups at the level
        self.weigh(self._shares())

    def note(self, results: Sequence[GroupResult]) -> None:
        """Move on once the level is solved often enough."""
        for result in results:
            is_last = self._level + 1 == len(self.pools)
            if result.env != self.pools[self._level].env:
                continue
            self._newest = [*self._newest, result.success][-self._settings.groups :]
            is_full = len(self._newest) == self._settings.groups
            if is_full and not is_last and np.mean(self._newest) >= self._settings.target:
                self._level, self._newest = self._level + 1, []
        self.weigh(self._shares())

    def metrics(self) -> dict[str, float]:
        """Return the level, counted from 1, its success, and each environment's share."""
        known = {"success": float(np.mean(self._newest))} if self._newest else {}
        values = {"level": self._level + 1.0, **known, **_named_shares(self.pools, self._shares())}
        return {f"{PREFIX}/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draws depend on, in plain types."""
        return {**super().state_dict(), _KEPT: {"level": self._level, "newest": self._newest}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state)
        known = state.get(_KEPT, {"level": 0, "newest": []})
        self._level, self._newest = known["level"], list(known["newest"])
        self.weigh(self._shares())

    def _shares(self) -> list[float]:
        review = self._settings.review / self._level if self._level else 0.0
        own = 1.0 - review * self._level
        return [*[review] * self._level, own, *[0.0] * (len(self.pools) - self._level - 1)]


class ProgressDraws(CurriculumDraws):
    """Environments by the movement of their success; see `LearningProgress`."""

    def __init__(self, settings: LearningProgress, pools: Sequence[TaskPool], seed: int) -> None:
        """Begin with all of `pools` alike."""
        super().__init__(pools, seed)
        self._settings = settings
        self._means: dict[str, list[float]] = {}  # fast and slow
        self.weigh(self._shares())

    def note(self, results: Sequence[GroupResult]) -> None:
        """Follow each environment's success by a fast and a slow running mean."""
        for result in results:
            fast, slow = self._means.get(result.env, [result.success, result.success])
            self._means[result.env] = [
                fast + _FAST * (result.success - fast),
                slow + _SLOW * (result.success - slow),
            ]
        self.weigh(self._shares())

    def metrics(self) -> dict[str, float]:
        """Return each environment's progress and share."""
        progress = {f"progress/{env}": fast - slow for env, (fast, slow) in self._means.items()}
        values = progress | _named_shares(self.pools, self._shares())
        return {f"{PREFIX}/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draws depend on, in plain types."""
        return {**super().state_dict(), _KEPT: {env: list(own) for env, own in self._means.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state)
        self._means = {env: list(means) for env, means in state.get(_KEPT, {}).items()}
        self.weigh(self._shares())

    def _shares(self) -> list[float]:
        means = [self._means.get(pool.env, [0.0, 0.0]) for pool in self.pools]
        progress = np.array([abs(fast - slow) for fast, slow in means])
        even = np.full(len(self.pools), 1.0 / len(self.pools))
        moved = progress / progress.sum() if progress.sum() > 0 else even
        shares: list[float] = (
            self._settings.explore * even + (1.0 - self._settings.explore) * moved
        ).tolist()
        return shares


class PoolDraws(CurriculumDraws):
    """Tasks by the success of their last group; see `Pools`."""

    def __init__(self, pools: Sequence[TaskPool], seed: int) -> None:
        """Begin with new tasks only; each pool here has a number of them."""
        super().__init__(pools, seed)
        self._names = list(_POOLS)
        self._kinds = [np.zeros(len(pool.tasks or ()), np.int8) for pool in pools]
        self._places = [{task: i for i, task in enumerate(pool.tasks or ())} for pool in pools]
        self._in_batch: set[tuple[int, int]] = set()

    def draw(self, count: int) -> Any:
        """Return the next `count` tasks, none of them twice where there are enough."""
        self._in_batch.clear()
        return super().draw(count)

    def note(self, results: Sequence[GroupResult]) -> None:
        """Move each task to where its success says."""
        numbers = {pool.env: i for i, pool in enumerate(self.pools)}
        for result in results:
            name = "hard" if result.success <= 0 else "easy" if result.success >= 1 else (
                _SOLVED_AT_TIMES
            )  # fmt: skip
            i = numbers[result.env]
            self._kinds[i][self._places[i][result.task]] = self._names.index(name)

    def metrics(self) -> dict[str, float]:
        """Return how many tasks each pool holds."""
        kinds = np.concatenate(self._kinds)
        return {
            f"{PREFIX}/tasks/{name}": float((kinds == k).sum())
            for k, name in enumerate(self._names)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draws depend on, in plain types."""
        return {**super().state_dict(), _KEPT: [kinds.tolist() for kinds in self._kinds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
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


def _named_shares(pools: Sequence[TaskPool], shares: Sequence[float]) -> dict[str, float]:
    return {f"share/{pool.env}": share for pool, share in zip(pools, shares, strict=True)}
