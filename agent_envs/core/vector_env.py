"""A vector environment whose members run concurrently, each in its own thread.

``gym.make_vec(id, num_envs=64)`` makes it. It starts the work of all members, then lets
`gymnasium.vector.SyncVectorEnv` collect the results.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from agent_envs.core.async_bridge import Worker, result_in_time
from agent_envs.errors import ActionTypeError, ConfigurationError

DEFAULT_STEP_TIMEOUT_SECONDS: Final = 300.0
CLOSE_TIMEOUT_SECONDS: Final = 10.0

_LOGGER = logging.getLogger(__name__)
_CALLER_ERRORS: Final = (ActionTypeError, ConfigurationError, gym.error.Error)


class _Member(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is made, stepped and closed in one thread, and replaced if it fails.

    `begin` starts a call in the thread; `reset` and `step`, called afterwards, wait for the result.
    """

    def __init__(
        self, number: int, make: Callable[[], gym.Env[Any, Any]], timeout: float | None
    ) -> None:
        self._number, self._make, self._timeout = number, make, timeout
        self._call: Future[Any] | None = None
        self._deadline: float | None = None
        self._seed: int | None = None
        self._next_seed: int | None = None  # of a replacement
        self._observation: Any = None
        self._thread = Worker()
        super().__init__(self._thread.submit(make).result())

    def begin(self, function: Callable[[], Any]) -> None:
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        self._call = self._thread.submit(function)

    def finish(self) -> Any:
        assert self._call is not None  # noqa: S101 - begun before
        call, self._call = self._call, None
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return result_in_time(call, left, self._timeout)

    def begin_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._seed = self._seed if seed is None else seed
        seed = self._next_seed if seed is None else seed
        self.begin(functools.partial(self.env.reset, seed=seed, options=options))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        report: dict[str, str] = {}
        if self._call is None:
            self.begin_reset(seed, options)
        try:
            self._observation, info = self.finish()
        except _CALLER_ERRORS:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            report = self._replace(error, seed)
            self.begin_reset(seed, options)
            self._observation, info = self.finish()
        self._next_seed = None
        return self._observation, info | report

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            result: tuple[Any, Any, bool, bool, dict[str, Any]] = self.finish()
        except _CALLER_ERRORS:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            return self._observation, 0.0, False, True, self._replace(error)
        self._observation = result[0]
        return result

    def begin_close(self) -> None:
        self._timeout = CLOSE_TIMEOUT_SECONDS
        self.begin(self.env.close)
        self._thread.stop()

    def close(self) -> None:
        try:
            self.finish()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            _LOGGER.warning("Member %d was not closed: %s", self._number, error)

    def _replace(self, error: BaseException, seed: int | None = None) -> dict[str, str]:
        """Replace the environment after `error`; return the info that reports it.

        The next episode has `seed`, or else a seed drawn from that of the member.
        """
        self._thread.submit(self.env.close)  # after the failed call, if that ever returns
        self._thread.stop()
        self._thread = Worker()
        self.begin(self._make)
        self.env = self.finish()
        if seed is None and self._seed is not None:
            sequence = np.random.SeedSequence((self._seed, 1))
            seed = self._seed = self._next_seed = int(sequence.generate_state(1)[0])
        kind = "" if type(error) is TimeoutError else f"{type(error).__name__}: "
        text = f"{kind}{error}; replaced by a new environment with seed {seed}"
        _LOGGER.warning("Member %d failed: %s", self._number, text)
        return {"member_error": text}


class ThreadVectorEnv(SyncVectorEnv[Any, Any]):
    """`SyncVectorEnv` whose members reset and step concurrently.

    Observations, rewards, infos with their masks, seeds, options and the three autoreset modes are
    those of `SyncVectorEnv`. Each member is made, stepped and closed in its own thread. One that
    takes longer than `step_timeout` seconds, or raises, is replaced: its episode ends
    ``truncated``, with its last observation, reward 0 and ``infos["member_error"]``; the new
    environment starts with a seed drawn from that of the member. Errors of the caller (an action
    that is not text, an unknown task) are raised. A thread cannot be killed: one that hangs is
    abandoned.
    """

    envs: list[_Member]  # type: ignore[assignment]

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        step_timeout: float | None = DEFAULT_STEP_TIMEOUT_SECONDS,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        """Make the members, one after the other.

        Args:
            env_fns: One function per member that makes it and its replacements.
            step_timeout: Seconds that a reset or step may take; None for no limit.
            autoreset_mode: When a member whose episode is over is reset.
        """
        members = [
            functools.partial(_Member, number, make, step_timeout)
            for number, make in enumerate(env_fns)
        ]
        super().__init__(members, autoreset_mode=autoreset_mode)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all members, or those of ``options["reset_mask"]``; see `SyncVectorEnv`."""
        self._require_open()
        seeds: list[int | None] = (
            seed
            if isinstance(seed, list)
            else [None if seed is None else seed + number for number in range(self.num_envs)]
        )
        if "reset_mask" not in (options or {}) and len(seeds) == self.num_envs:
            for member, one in zip(self.envs, seeds, strict=True):
                member.begin_reset(one, options)
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every member; see `SyncVectorEnv`."""
        self._require_open()
        chosen = list(iterate(self.action_space, actions))
        if len(chosen) != self.num_envs:
            raise ValueError(f"{len(chosen)} actions for {self.num_envs} environments.")
        resets_now = (self.autoreset_mode == AutoresetMode.NEXT_STEP) & self._autoreset_envs
        for member, action, is_reset in zip(self.envs, chosen, resets_now, strict=True):
            if is_reset:
                member.begin_reset(None, None)
            else:
                member.begin(functools.partial(member.env.step, action))
        return super().step(actions)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every member; wait at most `CLOSE_TIMEOUT_SECONDS` for all together."""
        members = getattr(self, "envs", ())
        for member in members:
            member.begin_close()
        for member in members:
            member.close()

    def _require_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("The vector environment is closed.")

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        return add_info(vector_infos, env_info, env_num, self.num_envs)


def make_threaded(
    id: str,
    num_envs: int,
    *,
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    step_timeout: float | None = DEFAULT_STEP_TIMEOUT_SECONDS,
    member_wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    **kwargs: Any,
) -> ThreadVectorEnv:
    """Make `num_envs` members of an id, as ``gym.make_vec`` does; they share the `kwargs`.

    `member_wrappers` are put around each member, the first one innermost. (``gym.make_vec`` refuses
    its own ``wrappers`` for an id with a vector entry point.)
    """

    def make() -> gym.Env[Any, Any]:
        return functools.reduce(
            lambda env, wrap: wrap(env), member_wrappers, gym.make(id, **kwargs)
        )

    return ThreadVectorEnv(
        [make] * num_envs, autoreset_mode=autoreset_mode, step_timeout=step_timeout
    )


def __getattr__(name: str) -> Callable[..., ThreadVectorEnv]:
    """Return `make_threaded` for an id, for ``vector_entry_point``.

    Gymnasium does not pass the id to a ``vector_entry_point``, and only a string can be saved with
    the spec, so the string holds the id: "agent_envs.core.vector_env:My/Env-v0".
    """
    if name in gym.registry:
        return functools.partial(make_threaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def add_info(
    infos: dict[str, Any], info: Mapping[str, Any], number: int, size: int
) -> dict[str, Any]:
    """Add the info of member `number` of `size` to the batched `infos`, and return them.

    As in `VectorEnv._add_info`, each key holds an array with an entry per member and ``_key`` a
    mask, recursively. But values that do not fit into one array make an array of objects, where
    Gymnasium raises or casts 0.5 to 0: models write arguments of any type.
    """
    for key, value in info.items():
        column = infos.get(key)
        mask = infos.setdefault(f"_{key}", np.zeros(size, np.bool_))
        has_columns = isinstance(value, dict) and not any(str(k).startswith("_") for k in value)
        if has_columns and key != "final_obs" and isinstance(column, dict | None):
            infos[key] = add_info(column or {}, value, number, size)
        else:
            empty = np.full(size, None, object) if key == "final_obs" else _empty(value, size)
            if column is None:
                column = empty
            elif isinstance(column, dict) or (column.dtype, column.shape) != (
                empty.dtype, empty.shape
            ):  # fmt: skip
                column = _as_objects(column, mask)
            column[number] = value
            infos[key] = column
        mask[number] = True
    return infos


def _empty(value: Any, size: int) -> npt.NDArray[Any]:
    """Return a column for `value` and its like."""
    if isinstance(value, bool | int | float | np.number | np.ndarray):
        like = np.asarray(value)
        if like.dtype != object:
            return np.zeros((size, *like.shape), like.dtype)
    return np.full(size, None, object)


def _as_objects(column: Any, mask: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    objects = np.full(len(mask), None, object)
    for number in np.flatnonzero(mask).tolist():
        objects[number] = _value_of(column, number)
    return objects


def _value_of(column: Any, number: int) -> Any:
    """Return the value of a member in a column."""
    if isinstance(column, dict):
        names = [name for name in column if f"_{name}" in column and column[f"_{name}"][number]]
        return {name: _value_of(column[name], number) for name in names}
    value = column[number]
    return value.item() if isinstance(value, np.generic) else value
