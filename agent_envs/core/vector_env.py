"""A vector environment whose members run concurrently.

``gym.make_vec(id, num_envs=64)`` makes it. It starts the work of all members, then lets
`gymnasium.vector.SyncVectorEnv` collect the results.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from agent_envs.core.async_bridge import CallSession, Outcome, call_with_deadline
from agent_envs.errors import ActionTypeError, ConfigurationError

DEFAULT_STEP_TIMEOUT_SECONDS: Final = 300.0
CLOSE_TIMEOUT_SECONDS: Final = 10.0

_LOGGER = logging.getLogger(__name__)
_CALLER_ERRORS: Final = (ActionTypeError, ConfigurationError, gym.error.Error)


class _Member(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is replaced if it fails; its calls run before their results are read."""

    def __init__(
        self, number: int, make: Callable[[], gym.Env[Any, Any]], timeout: float | None
    ) -> None:
        self._number, self._make, self._timeout = number, make, timeout
        self._seed: int | None = None
        self._next_seed: int | None = None  # of a replacement
        self._observation: Any = None
        self.outcome: Outcome | None = None
        super().__init__(make())

    def reset_call(self, seed: int | None, options: dict[str, Any] | None) -> Callable[[], Any]:
        self._seed = self._seed if seed is None else seed
        seed = self._next_seed if seed is None else seed
        return functools.partial(self.env.reset, seed=seed, options=options)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        report: dict[str, str] = {}
        try:
            self._observation, info = self._result(self.reset_call(seed, options))
        except _CALLER_ERRORS:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            report = self._replace(error, seed)
            self._observation, info = self._result(self.reset_call(seed, options))
        self._next_seed = None
        return self._observation, info | report

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            result: tuple[Any, Any, bool, bool, dict[str, Any]] = self._result(None)
        except _CALLER_ERRORS:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            return self._observation, 0.0, False, True, self._replace(error)
        self._observation = result[0]
        return result

    def _result(self, function: Any) -> Any:
        """Return the result of the call that has run; without one, call `function`."""
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            return call_with_deadline(function, self._timeout)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _replace(self, error: BaseException, seed: int | None = None) -> dict[str, str]:
        """Replace the environment after `error`; return the info that reports it.

        The next episode has `seed`, or else a seed drawn from that of the member.
        """
        CallSession().submit(0, self.env.close)
        self.env = call_with_deadline(self._make, self._timeout)
        if seed is None and self._seed is not None:
            sequence = np.random.SeedSequence((self._seed, 1))
            seed = self._seed = self._next_seed = int(sequence.generate_state(1)[0])
        kind = "" if type(error) is TimeoutError else f"{type(error).__name__}: "
        text = f"{kind}{error}; replaced by a new environment with seed {seed}"
        _LOGGER.warning("Member %d failed: %s", self._number, text)
        return {"member_error": text}


class ThreadVectorEnv(SyncVectorEnv[Any, Any]):
    """`SyncVectorEnv` whose members reset and step concurrently, in a pool of threads.

    Observations, rewards, infos with their masks, seeds, options and the three autoreset modes are
    those of `SyncVectorEnv`. A member that takes longer than `step_timeout` seconds, or raises, is
    replaced: its episode ends ``truncated``, with its last observation, reward 0 and
    ``infos["member_error"]``; the new environment starts with a seed drawn from that of the member.
    Errors of the caller (an action that is not text, an unknown task) are raised. A thread cannot
    be killed: one that hangs is abandoned.
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

        Each of `env_fns` makes a member and its replacements. A reset or step may take
        `step_timeout` seconds; None for no limit.
        """
        members = [
            functools.partial(_Member, number, make, step_timeout)
            for number, make in enumerate(env_fns)
        ]
        self._step_timeout = step_timeout
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
        calls = {}
        if "reset_mask" not in (options or {}) and len(seeds) == self.num_envs:
            calls = {i: self.envs[i].reset_call(one, options) for i, one in enumerate(seeds)}
        self._run(calls)
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every member; see `SyncVectorEnv`."""
        self._require_open()
        chosen = list(iterate(self.action_space, actions))
        if len(chosen) != self.num_envs:
            raise ValueError(f"{len(chosen)} actions for {self.num_envs} environments.")
        is_next_step = self.autoreset_mode == AutoresetMode.NEXT_STEP
        self._run(
            {
                i: member.reset_call(None, None)
                if is_next_step and self._autoreset_envs[i]
                else functools.partial(member.env.step, action)
                for i, (member, action) in enumerate(zip(self.envs, chosen, strict=True))
            }
        )
        return super().step(actions)

    def _run(self, calls: Mapping[int, Callable[[], Any]]) -> None:
        """Run calls of members side by side; each member has its outcome."""
        for member in self.envs:
            member.outcome = None
        for outcome in _outcomes(calls, self._step_timeout):
            self.envs[outcome.key].outcome = outcome

    def close_extras(self, **kwargs: Any) -> None:
        """Close every member; wait at most `CLOSE_TIMEOUT_SECONDS`."""
        closes = {i: member.env.close for i, member in enumerate(getattr(self, "envs", ()))}
        for outcome in _outcomes(closes, CLOSE_TIMEOUT_SECONDS):
            if outcome.error is not None:
                _LOGGER.warning("Member %d was not closed: %s", outcome.key, outcome.error)

    def _require_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("The vector environment is closed.")

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


def _outcomes(calls: Mapping[int, Callable[[], Any]], timeout: float | None) -> Iterator[Outcome]:
    session = CallSession()
    for key, call in calls.items():
        session.submit(key, call, math.inf if timeout is None else timeout)
    while session:
        yield from session.wait(math.inf)


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
