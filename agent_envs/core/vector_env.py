"""A vector environment whose members run concurrently.

``gym.make_vec(id, num_envs=64)`` makes it. It starts the work of all members, then lets
`gymnasium.vector.SyncVectorEnv` collect the results.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from agent_envs.core.async_bridge import submit

DEFAULT_STEP_TIMEOUT_SECONDS: Final = 300.0


class _Member(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose calls begin before their results are read."""

    call: "Future[Any] | None" = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        call, self.call = self.call, None
        return call.result() if call else self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        call, self.call = self.call, None
        return call.result() if call else self.env.step(action)


class ThreadVectorEnv(SyncVectorEnv[Any, Any]):
    """`SyncVectorEnv` whose members reset and step concurrently, in a pool of threads.

    Observations, rewards, infos with their masks, seeds, options and the three autoreset modes are
    those of `SyncVectorEnv`. A member's error is raised, and a TimeoutError where one takes longer
    than `step_timeout` seconds. A thread cannot be killed: one that hangs is abandoned.
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

        A reset or step may take `step_timeout` seconds; None for no limit.
        """
        self._step_timeout = step_timeout
        members = [lambda make=make: _Member(make()) for make in env_fns]
        super().__init__(members, autoreset_mode=autoreset_mode)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all members, or those of ``options["reset_mask"]``; see `SyncVectorEnv`."""
        seeds: list[int | None] = (
            seed
            if isinstance(seed, list)
            else [None if seed is None else seed + number for number in range(self.num_envs)]
        )
        calls = {}
        if "reset_mask" not in (options or {}) and len(seeds) == self.num_envs:
            calls = {
                i: functools.partial(self.envs[i].env.reset, seed=one, options=options)
                for i, one in enumerate(seeds)
            }
        self._run(calls)
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every member; see `SyncVectorEnv`."""
        chosen = iterate(self.action_space, actions)
        is_next_step = self.autoreset_mode == AutoresetMode.NEXT_STEP
        self._run(
            {
                i: member.env.reset
                if is_next_step and self._autoreset_envs[i]
                else functools.partial(member.env.step, action)
                for i, (member, action) in enumerate(zip(self.envs, chosen, strict=True))
            }
        )
        return super().step(actions)

    def _run(self, calls: Mapping[int, Callable[[], Any]]) -> None:
        """Run calls of members concurrently, to their ends; each member keeps its future."""
        for number, member in enumerate(self.envs):
            member.call = submit(calls[number]) if number in calls else None
        # all of them, or a call would still run when its member's next one begins
        if wait([m.call for m in self.envs if m.call], self._step_timeout).not_done:
            raise TimeoutError(f"no result within {self._step_timeout:g} seconds")

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        if "arguments" in env_info:  # of any types: models write them
            arguments = vector_infos.setdefault("arguments", np.full(self.num_envs, None, object))
            arguments[env_num] = env_info["arguments"]
            mask = vector_infos.setdefault("_arguments", np.zeros(self.num_envs, np.bool_))
            mask[env_num] = True
            env_info = {name: each for name, each in env_info.items() if name != "arguments"}
        infos: dict[str, Any] = super()._add_info(vector_infos, env_info, env_num)
        return infos


def make_threaded(
    id: str,
    num_envs: int,
    *,
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    step_timeout: float | None = DEFAULT_STEP_TIMEOUT_SECONDS,
    **kwargs: Any,
) -> ThreadVectorEnv:
    """Make `num_envs` members of an id, as ``gym.make_vec`` does; they share the `kwargs`."""
    make = functools.partial(gym.make, id, **kwargs)
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
