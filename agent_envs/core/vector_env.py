"""A vector environment whose members wait for their tools at the same time, each in a thread.

It is what ``gym.make_vec(id, num_envs=64)`` makes. Everything that can be seen from outside is
`gymnasium.vector.SyncVectorEnv`'s own doing: this class only plays the members before it asks.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from agent_envs.core.vector_infos import add_info
from agent_envs.core.vector_member import Member

DEFAULT_STEP_TIMEOUT_SECONDS: Final = 300.0
CLOSE_TIMEOUT_SECONDS: Final = 10.0


class ThreadVectorEnv(SyncVectorEnv[Any, Any]):
    """`SyncVectorEnv`, but the members reset and step at once, and none keeps the others waiting.

    Observations, rewards, infos with their masks, seeds, options and the three autoreset modes are
    those of `SyncVectorEnv`. Each member lives in a thread of its own, in which it is made, played
    and closed. One that has not returned after `step_timeout` seconds, or that raised, is reported
    and replaced: its episode ends ``truncated``, with its last observation, reward 0 and
    ``infos["member_error"]``; a fresh environment takes its place, and begins with a seed drawn
    from the member's own. What the caller did wrong (an action that is no text, a task that does
    not exist) is raised, as everywhere.

    A thread cannot be killed. In one that hangs, `SystemExit` is raised: it ends a loop of Python
    code, but what hangs outside of Python is left to itself.
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
            env_fns: One function per member that makes it, also when it has to be replaced.
            step_timeout: Seconds a reset or a step may take; None waits for ever. A last resort:
                tools have timeouts of their own.
            copy: See `SyncVectorEnv`, as for the other arguments.
            observation_mode: How observation spaces are batched.
            autoreset_mode: When a member whose episode is over begins the next.
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
        seeds = _seeds(seed, self.num_envs)
        rest = options and {name: options[name] for name in options if name != "reset_mask"}
        is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        if is_mask and mask.shape == (self.num_envs,) and len(seeds) == self.num_envs:
            for member, one in itertools.compress(zip(self.envs, seeds, strict=True), mask):
                member.begin_reset(one, rest)
        # It says what is wrong with arguments for which nothing has begun.
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play one step of every member at once; see `SyncVectorEnv`."""
        self._require_open()
        chosen = list(iterate(self.action_space, actions))
        if len(chosen) != self.num_envs:
            raise ValueError(f"{len(chosen)} actions for {self.num_envs} environments.")
        for member, action in zip(self.envs, chosen, strict=True):
            member.begin_step(action, self.autoreset_mode)
        return super().step(actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every member at once, in its thread, or get an attribute.

        Raises:
            TimeoutError: If a member does not answer within the timeout of a step.
            Exception: What a member raised.
        """
        self._require_open()
        for member in self.envs:
            member.begin_call(name, *args, **kwargs)
        return tuple(member.finish_call() for member in self.envs)

    def render(self) -> tuple[Any, ...]:
        """Render every member."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Close every member, but wait no longer than `CLOSE_TIMEOUT_SECONDS` in all."""
        for member in getattr(self, "envs", ()):
            member.begin_close(CLOSE_TIMEOUT_SECONDS)
        for member in getattr(self, "envs", ()):
            member.close()

    def _require_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("The vector environment is closed.")

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        return add_info(vector_infos, env_info, env_num, self.num_envs)


def _seeds(seed: int | Sequence[int | None] | None, size: int) -> Sequence[int | None]:
    if seed is None or isinstance(seed, int):
        return [None if seed is None else seed + number for number in range(size)]
    return seed


def make_threaded(
    id: str,
    num_envs: int,
    *,
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    step_timeout: float | None = DEFAULT_STEP_TIMEOUT_SECONDS,
    member_wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    **kwargs: Any,
) -> ThreadVectorEnv:
    """Make `num_envs` members of an id; what ``gym.make_vec`` calls.

    Args:
        id: The id of the members.
        num_envs: How many.
        autoreset_mode: When a member whose episode is over begins the next.
        step_timeout: See `ThreadVectorEnv`.
        member_wrappers: Put around each member, the first one innermost. (``gym.make_vec`` refuses
            its own ``wrappers`` where an id brings its vector environment along.)
        kwargs: For ``gym.make``. The members share what is passed here.
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
    """Return the function that makes members of an id, for ``vector_entry_point``.

    Gymnasium does not tell a ``vector_entry_point`` whose it is, and only one that is a string can
    be saved with its spec: so the string names the id, "agent_envs.core.vector_env:My/Env-v0".
    """
    if name in gym.registry:
        return functools.partial(make_threaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
