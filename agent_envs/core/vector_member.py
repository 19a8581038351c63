"""One environment of a vector, in its own thread, with a timeout for each call."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import gymnasium as gym
import numpy as np

from agent_envs.core.async_bridge import Worker
from agent_envs.errors import ActionTypeError, ConfigurationError

_LOGGER = logging.getLogger(__name__)
_CALLER_ERRORS: Final = (ActionTypeError, ConfigurationError, gym.error.Error)

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


class Member(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is made, stepped and closed in one thread, and replaced if it fails.

    `begin_reset` and `begin_step` start the work in the thread; `reset` and `step`, called
    afterwards, wait for the result.
    """

    def __init__(
        self, number: int, make: Callable[[], gym.Env[Any, Any]], timeout: float | None
    ) -> None:
        """Make the environment.

        Args:
            number: Index of the member, for messages.
            make: Makes the environment, and each replacement.
            timeout: Seconds that a reset or step may take; None for no limit.
        """
        self._number, self._make, self._timeout = number, make, timeout
        self._calls: deque[Future[Any]] = deque()
        self._seconds: float | None = None
        self._deadline: float | None = None
        self._seed: int | None = None
        self._replacement_seed: int | None = None
        self._num_replacements = 0
        self._observation: Any = None
        self._thread = Worker()
        super().__init__(self._thread.submit(make).result())

    def begin_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Start a reset; `reset` returns its result."""
        if seed is not None:
            self._seed, self._num_replacements = seed, 0
        elif self._replacement_seed is not None:
            seed = self._replacement_seed
        env = self.env
        self.begin(lambda: env.reset(seed=seed, options=options))

    def begin_step(self, action: Any, *, resets: bool) -> None:
        """Start a step, followed by a reset if it ends the episode and `resets` is True."""
        env = self.env
        self.begin(lambda: env.step(action))
        if resets:
            step = self._calls[0]
            self._submit(lambda: env.reset() if any(step.result()[2:4]) else None)

    def begin(self, function: Callable[[], Any], timeout: float | None = None) -> None:
        """Start a call; `finish` returns its result."""
        self._calls.clear()  # calls whose results an exception left unread
        self._seconds = self._timeout if timeout is None else timeout
        self._deadline = None if self._seconds is None else time.monotonic() + self._seconds
        self._submit(function)

    def finish(self) -> Any:
        """Return the result of the oldest call.

        Raises:
            TimeoutError: If there is none in time.
            Exception: Any exception of the call.
        """
        call = self._calls.popleft()
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            return call.result(left)
        except TimeoutError:
            if call.done():
                raise
            raise TimeoutError(f"no result within {self._seconds:g} seconds") from None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset; if it fails, replace the environment and reset the new one.

        Raises:
            Exception: An error of the caller, or of the second environment.
        """
        report: dict[str, str] = {}
        if not self._calls:
            self.begin_reset(seed, options)
        try:
            self._observation, info = self.finish()
        except _CALLER_ERRORS:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            report = self._replace(error, seed)
            self.begin_reset(seed, options)
            try:
                self._observation, info = self.finish()
            except (Exception, SystemExit) as again:
                again.add_note(f"Member {self._number}; its replacement failed, too.")
                raise
        self._replacement_seed = None
        return self._observation, {**info, **report} if report else info

    def step(self, action: Any) -> StepResult:
        """Wait for the step; if it fails, truncate the episode and replace the environment.

        Raises:
            Exception: An error of the caller.
        """
        try:
            result: StepResult = self.finish()
        except _CALLER_ERRORS:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            return self._observation, 0.0, False, True, self._replace(error)
        self._observation = result[0]
        if not any(result[2:4]):
            self._calls.clear()  # no reset follows
        return result

    def close(self) -> None:
        """Wait until `begin_close` has closed the environment, or for its timeout."""
        try:
            self.finish()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            _LOGGER.warning("Member %d was not closed: %s", self._number, _describe(error))

    def begin_close(self, timeout: float) -> None:
        """Start to close the environment, and end the thread."""
        self.begin(self.env.close, timeout)
        self._thread.stop()

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the environment, not of the member."""
        return self.env.set_wrapper_attr(name, value, force=force)

    def _submit(self, function: Callable[[], Any]) -> None:
        self._calls.append(self._thread.submit(function))

    def _replace(self, error: BaseException, seed: int | None = None) -> dict[str, str]:
        """Replace the environment after `error`; return the info that reports it.

        The next episode has `seed`, or else a seed drawn from that of the member.

        Raises:
            Exception: If no other environment can be made.
        """
        self._thread.submit(self.env.close)  # after the failed call, if that ever returns
        self._thread.stop()
        self._thread = Worker()
        self.begin(self._make)
        try:
            self.env = self.finish()
        except (Exception, SystemExit) as failure:
            failure.add_note(f"Member {self._number} could not be replaced.")
            raise
        if seed is None and self._seed is not None:
            self._num_replacements += 1
            sequence = np.random.SeedSequence((self._seed, self._num_replacements))
            seed = self._replacement_seed = int(sequence.generate_state(1)[0])
        text = f"{_describe(error)}; replaced by a new environment with seed {seed}"
        _LOGGER.warning("Member %d failed: %s", self._number, text)
        return {"member_error": text}


def _describe(error: BaseException) -> str:
    return str(error) if type(error) is TimeoutError else f"{type(error).__name__}: {error}"
