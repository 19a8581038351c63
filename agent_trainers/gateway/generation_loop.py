"""One stream of a policy for calls from any thread.

A stream is worked in one thread; calls come and go at any time. What they ask waits in a queue
until the thread that runs the loop looks at it, and so does what they no longer want.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from agent_trainers.gateway.api_error import ApiError
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.streams import GenerationStream
from agent_trainers.trajectory import StopReason

IDLE_SECONDS: Final = 0.05
GATHER_SECONDS: Final = 0.02
"""How long a wave waits for more calls, as in a rollout."""
_TOGETHER_SECONDS: Final = 0.005
"""How long the first call waits for those of other sessions, so that they are read as one batch."""

_log = logging.getLogger(__name__)
Command = Callable[[GenerationStream], None]


class GenerationLoop:
    """Serves calls through streams of one policy."""

    def __init__(self, policy: Policy, num_sessions: Callable[[], int]) -> None:
        """Serve with `policy`; `num_sessions` says how many callers there are."""
        self._policy = policy
        self._num_sessions = num_sessions
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._under_way: dict[int, tuple[GenerationRequest, Future[Generation]]] = {}

    def submit(self, key: int, request: GenerationRequest) -> Future[Generation]:
        """Ask for an action; `key` has none under way. The future cannot be cancelled: `drop` it.

        Raises (the future):
            ApiError: If the state cannot be rendered, or the policy failed.
        """
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        self._commands.put(lambda stream: self._add(stream, key, request, future))
        return future

    def drop(self, key: int) -> None:
        """Forget what `key` asked for and what is kept for it; it asks no more."""

        def drop(stream: GenerationStream) -> None:
            if (call := self._under_way.pop(key, None)) is not None:
                call[1].set_exception(ApiError(403, "The session was closed.", code="closed"))
            stream.drop(key)

        self._commands.put(drop)

    def run(
        self, is_active: Callable[[], bool], is_any_active: Callable[[bool], bool] = bool
    ) -> None:
        """Work in this thread while `is_active`; see `Rollout` for `is_any_active`.

        What is under way at its end is begun anew the next time.

        Raises:
            Exception: What the policy raised; all calls under way have failed with it.
        """
        stream = self._policy.open_stream()
        try:
            for key, (request, _) in self._under_way.items():
                stream.add(key, request)
            while is_any_active(is_active()):
                is_busy = is_any_active(stream.has_requests)
                self._take_in(stream, is_busy=is_busy)
                if is_busy:
                    for key, result in stream.advance():
                        stream.rest(key)  # its program may never ask again
                        self._deliver(key, result)
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            stream.close()

    def refuse_all(self, error: BaseException) -> None:
        """Refuse with `error` what is asked for, while nobody runs the loop."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()(_CLOSED)
        self._fail_all(error)

    def _take_in(self, stream: GenerationStream, *, is_busy: bool) -> None:
        """Carry out what waits; wait for it where nothing else is to be done, or it pays to."""
        until = time.monotonic()
        if not is_busy:
            until += IDLE_SECONDS
        elif stream.gathers:
            until += GATHER_SECONDS
        ends_a_pause = not is_busy
        while True:
            left = until - time.monotonic()
            is_full = len(self._under_way) >= self._num_sessions()
            waits = left > 0 and (ends_a_pause or not is_full)
            try:
                command = self._commands.get(timeout=left) if waits else self._commands.get_nowait()
            except queue.Empty:
                return
            if ends_a_pause:
                ends_a_pause, until = False, time.monotonic() + _TOGETHER_SECONDS
            command(stream)

    def _add(
        self,
        stream: GenerationStream,
        key: int,
        request: GenerationRequest,
        future: Future[Generation],
    ) -> None:
        try:
            prompt_ids = self._policy.encode(request)
        except Exception as error:  # noqa: BLE001 - a template refuses what a program said
            future.set_exception(
                ApiError(400, f"The messages cannot be rendered: {error}", param="messages")
            )
            return
        if prompt_ids is None:
            future.set_result(Generation(text="", finish_reason="overflow"))
            return
        self._under_way[key] = request, future
        stream.add(key, request)

    def _deliver(self, key: int, result: Generation | BaseException) -> None:
        call = self._under_way.pop(key, None)
        if call is None:  # nobody wants it any more
            return
        future = call[1]
        if isinstance(result, Generation):
            future.set_result(result)
        else:
            future.set_exception(_failure(result))

    def _fail_all(self, error: BaseException) -> None:
        failed, self._under_way = self._under_way, {}
        if failed:
            failure = _failure(error)
            for _, future in failed.values():
                future.set_exception(failure)


class _Closed(GenerationStream):
    """Takes requests, and never answers."""

    def advance(self) -> list[Any]:
        return []


_CLOSED: Final = _Closed()


def _failure(error: BaseException) -> ApiError:
    _log.warning("The policy failed.", exc_info=error)
    text = f"The policy failed: {type(error).__name__}: {error}"
    return ApiError(500, text, code="policy_error", stop_reason=StopReason.POLICY_ERROR)
