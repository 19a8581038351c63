"""One environment in a thread of its own, with a deadline for each call.

A member is played in two halves: `begin_step` or `begin_reset` hands the work to its thread, and
`step` or `reset`, called afterwards, waits for what came of it.
"""

import logging
import reprlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from agent_envs.core.async_bridge import Worker
from agent_envs.errors import ActionTypeError, ConfigurationError

_LOGGER = logging.getLogger(__name__)
_MISTAKES_OF_THE_CALLER: Final = (ActionTypeError, ConfigurationError, gym.error.Error)

_RESET_SIZE: Final = 2
_STEP_SIZE: Final = 5

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


class Member(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is made, played and closed in one thread; replaced if it fails."""

    def __init__(
        self, number: int, make: Callable[[], gym.Env[Any, Any]], timeout: float | None
    ) -> None:
        """Make the environment.

        Args:
            number: Its place among the members, for messages.
            make: Makes the environment, and each that takes its place.
            timeout: Seconds a reset or step may take; None waits for ever.
        """
        self._number, self._make, self._timeout = number, make, timeout
        self._begun: deque[Future[Any]] = deque()
        self._seconds: float | None = None
        self._deadline: float | None = None
        self._seed: int | None = None
        self._replacement_seed: int | None = None
        self._num_replacements = 0
        self._is_over = False
        self._observation: Any = None
        self._thread = Worker()
        super().__init__(self._thread.submit(make).result())

    # First halves

    def begin_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Begin to reset the environment; `reset` returns what came of it."""
        if seed is not None:
            self._seed, self._num_replacements = seed, 0
        elif self._replacement_seed is not None:
            seed = self._replacement_seed
        env = self.env
        self._begin(lambda: _whole(env.reset(seed=seed, options=options), _RESET_SIZE))

    def begin_step(self, action: Any, mode: AutoresetMode) -> None:
        """Begin a step, or the reset that stands in its place or follows it by `mode`."""
        if mode == AutoresetMode.NEXT_STEP and self._is_over:
            return self.begin_reset(None, None)
        env = self.env
        played = self._begin(lambda: _whole(env.step(action), _STEP_SIZE))
        if mode == AutoresetMode.SAME_STEP:
            self._work = self._thread.submit(
                lambda: _whole(env.reset(), _RESET_SIZE) if _is_over(played.result()) else None
            )
            self._begun.append(self._work)
        return None

    def begin_call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin to call a method or get an attribute; `finish_call` returns what came of it."""
        attribute = self.env.get_wrapper_attr
        self._begin(lambda: _get(attribute(name), args, kwargs))

    def begin_close(self, timeout: float) -> None:
        """Begin to close the environment; `close` waits for it."""
        self._begin(self.env.close, timeout)
        self._thread.stop()

    # Second halves

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that has begun; another environment takes the place of one that fails.

        Raises:
            Exception: What the environment raised, if the caller was wrong or the second one
                failed, too; a ``TimeoutError`` if that one did not return.
        """
        if not self._begun:
            self.begin_reset(seed, options)
        result, error = self._finish()
        report = {}
        if error is not None:
            if isinstance(error, _MISTAKES_OF_THE_CALLER):
                raise error
            report = self._replace(error, seed)
            self.begin_reset(seed, options)
            result, error = self._finish()
            if error is not None:
                error.add_note(f"Member {self._number}; a second environment failed as this one.")
                raise error
        self._observation, info = result
        self._is_over, self._replacement_seed = False, None
        return self._observation, {**info, **report} if report else info

    def step(self, action: Any) -> StepResult:
        """Wait for the step that has begun; one that failed ends the episode.

        Raises:
            Exception: What the environment raised, if the caller was wrong.
        """
        result, error = self._finish()
        if error is None:
            self._observation, self._is_over = result[0], _is_over(result)
            if not self._is_over:
                self._begun.clear()  # no reset follows
            return result  # type: ignore[no-any-return]
        self._begun.clear()
        if isinstance(error, _MISTAKES_OF_THE_CALLER):
            raise error
        self._is_over = True
        return self._observation, 0.0, False, True, self._replace(error)

    def finish_call(self) -> Any:
        """Return what the call that has begun returned, or raise what it raised."""
        result, error = self._finish()
        if error is not None:
            error.add_note(f"Member {self._number} of the vector environment.")
            raise error
        return result

    def close(self) -> None:
        """Wait until the environment is closed, or its time is up."""
        _, error = self._finish()
        if error is not None:
            _LOGGER.warning("Member %d was not closed: %s", self._number, _describe(error))

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the environment, not of the member."""
        return self.env.set_wrapper_attr(name, value, force=force)

    # Insides

    def _begin(self, work: Callable[[], Any], timeout: float | None = None) -> "Future[Any]":
        self._begun.clear()  # what an exception kept from being asked for
        self._seconds = self._timeout if timeout is None else timeout
        self._deadline = None if self._seconds is None else time.monotonic() + self._seconds
        self._work = self._thread.submit(work)
        self._begun.append(self._work)
        return self._work

    def _finish(self) -> tuple[Any, BaseException | None]:
        """Return what the oldest work that has begun returned, or why it failed."""
        work = self._begun.popleft()
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            error = work.exception(left)
        except TimeoutError:
            return None, TimeoutError(f"no result within {self._seconds:g} seconds")
        return (None, error) if error is not None else (work.result(), None)

    def _replace(self, error: BaseException, seed: int | None = None) -> dict[str, str]:
        """Put a fresh environment in the place of one that failed; return the info that says so.

        It begins with `seed`; without one, with a seed drawn from the member's own.

        Raises:
            Exception: If no other can be made.
        """
        self._begun.clear()
        self._thread.submit(self.env.close)  # once it returns, if it ever does
        self._thread.stop()
        self._thread = Worker()
        self._begin(self._make)
        env, failure = self._finish()
        if failure is not None:
            failure.add_note(f"No environment could be made in the place of member {self._number}.")
            raise failure
        self.env = env
        if seed is None and self._seed is not None:
            self._num_replacements += 1
            sequence = np.random.SeedSequence((self._seed, self._num_replacements))
            seed = self._replacement_seed = int(sequence.generate_state(1)[0])
        text = f"{_describe(error)}; a fresh environment takes its place, with seed {seed}"
        _LOGGER.warning("Member %d failed: %s", self._number, text)
        return {"member_error": text}


def _get(attribute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def _is_over(result: StepResult) -> bool:
    return bool(result[2] or result[3])


def _whole(result: Any, size: int) -> Any:
    """Return what `reset` or `step` returned, if the vector environment can take it apart.

    Raises:
        TypeError: If it is no tuple of that many values, with the info as the last.
    """
    if not (
        isinstance(result, tuple | list) and len(result) == size and isinstance(result[-1], dict)
    ):
        method = "step" if size == _STEP_SIZE else "reset"
        text = reprlib.repr(result)
        raise TypeError(f"{method}() returned {text}, not {size} values, the last one a dict")
    return result


def _describe(error: BaseException) -> str:
    return str(error) if type(error) is TimeoutError else f"{type(error).__name__}: {error}"
