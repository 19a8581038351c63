"""A vector environment whose members run concurrently, each in its own thread.

``gym.make_vec(id, num_envs=64)`` makes it. It starts the work of all members, then lets
`gymnasium.vector.SyncVectorEnv` collect the results.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from agent_envs.core.vector_member import Member

DEFAULT_STEP_TIMEOUT_SECONDS: Final = 300.0
CLOSE_TIMEOUT_SECONDS: Final = 10.0


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

    envs: list[Member]  # type: ignore[assignment]

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        step_timeout: float | None = DEFAULT_STEP_TIMEOUT_SECONDS,
        copy: bool = True,
        observation_mode: str | tuple[gym.Space[Any], gym.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        """Make the members, one after the other.

        Args:
            env_fns: One function per member that makes it and its replacements.
            step_timeout: Seconds that a reset or step may take; None for no limit.
            copy: See `SyncVectorEnv`, as for the other arguments.
            observation_mode: How observation spaces are batched.
            autoreset_mode: When a member whose episode is over is reset.
        """
        members = [
            functools.partial(Member, number, make, step_timeout)
            for number, make in enumerate(env_fns)
        ]
        super().__init__(members, copy, observation_mode, autoreset_mode)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all members, or those of ``options["reset_mask"]``; see `SyncVectorEnv`."""
        self._require_open()
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        seeds: Sequence[int | None] = (
            [None if seed is None else seed + number for number in range(self.num_envs)]
            if seed is None or isinstance(seed, int)
            else seed
        )
        rest = options and {name: options[name] for name in options if name != "reset_mask"}
        is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        if is_mask and mask.shape == (self.num_envs,) and len(seeds) == self.num_envs:
            for member, one in itertools.compress(zip(self.envs, seeds, strict=True), mask):
                member.begin_reset(one, rest)
        # SyncVectorEnv checks the arguments, and raises for those that started nothing.
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
                member.begin_step(action, resets=self.autoreset_mode == AutoresetMode.SAME_STEP)
        return super().step(actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every member in its thread, or get an attribute.

        Raises:
            TimeoutError: If a member takes longer than the timeout of a step.
            Exception: Any exception of a member.
        """
        self._require_open()
        for member in self.envs:
            attribute = member.env.get_wrapper_attr
            member.begin(functools.partial(_call, attribute, name, args, kwargs))
        return tuple(member.finish() for member in self.envs)

    def render(self) -> tuple[Any, ...]:
        """Render every member."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Close every member; wait at most `CLOSE_TIMEOUT_SECONDS` for all together."""
        members = getattr(self, "envs", ())
        for member in members:
            member.begin_close(CLOSE_TIMEOUT_SECONDS)
        for member in members:
            member.close()

    def _require_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("The vector environment is closed.")

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        return add_info(vector_infos, env_info, env_num, self.num_envs)


def _call(attribute: Callable[[str], Any], name: str, args: Any, kwargs: Any) -> Any:
    found = attribute(name)
    return found(*args, **kwargs) if callable(found) else found


def make_threaded(
    id: str,
    num_envs: int,
    *,
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    step_timeout: float | None = DEFAULT_STEP_TIMEOUT_SECONDS,
    member_wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    **kwargs: Any,
) -> ThreadVectorEnv:
    """Make `num_envs` members of an id, as ``gym.make_vec`` does.

    Args:
        id: The id of the members.
        num_envs: Number of members.
        autoreset_mode: When a member whose episode is over is reset.
        step_timeout: See `ThreadVectorEnv`.
        member_wrappers: Wrappers around each member, the first one innermost. (``gym.make_vec``
            refuses its own ``wrappers`` for an id with a vector entry point.)
        kwargs: For ``gym.make``; the members share these objects.
    """

    def make() -> gym.Env[Any, Any]:
        env = gym.make(id, **kwargs)
        for wrapper in member_wrappers:
            env = wrapper(env)
        return env

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
        mask = infos.get(f"_{key}", np.zeros(size, np.bool_))
        if key != "final_obs" and _has_columns(value) and isinstance(column, dict | None):
            column = add_info({} if column is None else column, value, number, size)
        else:
            like = _objects(size) if key == "final_obs" else _column_for(value, size)
            if column is None:
                column = like
            elif not _can_hold(column, like):
                column = _as_objects(column, mask)
            column[number] = value
        mask[number] = True
        infos[key], infos[f"_{key}"] = column, mask
    return infos


def _has_columns(value: Any) -> bool:
    """Return whether a value is a dictionary whose keys cannot be confused with masks."""
    return isinstance(value, dict) and all(
        isinstance(key, str) and not key.startswith("_") for key in value
    )


def _column_for(value: Any, size: int) -> npt.NDArray[Any]:
    is_number = type(value) in (int, float, bool) or isinstance(value, np.number)
    if is_number and not (type(value) is int and not -(2**63) <= value < 2**63):
        return np.zeros(size, type(value))
    if isinstance(value, np.ndarray):
        return np.zeros((size, *value.shape), value.dtype)
    return _objects(size)


def _objects(size: int) -> npt.NDArray[Any]:
    return np.full(size, None, object)


def _can_hold(column: Any, like: npt.NDArray[Any]) -> bool:
    if isinstance(column, dict):
        return False
    if column.dtype == object and column.ndim == 1:
        return True
    return bool(column.dtype == like.dtype and column.shape == like.shape)


def _as_objects(column: Any, mask: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    objects = _objects(len(mask))
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
