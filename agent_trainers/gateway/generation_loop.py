"""One generation stream of a policy for calls from any thread, and where their turns end.

A stream belongs to one thread. Calls and cancellations wait in a queue for the thread that runs the
loop.
"""

import bisect
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from agent_trainers.gateway.api_error import ApiError
from agent_trainers.policies.policy import Generation, GenerationRequest, GenerationStream, Policy
from agent_trainers.trajectory import StopReason

IDLE_SECONDS: Final = 0.05
GATHER_SECONDS: Final = 0.02
"""How long a wave waits for more calls, as in a rollout."""

_EXTRA_TOKENS: Final = 8
"""Tokens decoded beyond one per byte of a stop text: some tokens have no text."""

_log = logging.getLogger(__name__)
Decode = Callable[[Sequence[int]], str | None]
_Call = tuple[GenerationRequest, Future[Generation]]
_CLOSED: Final = ApiError(403, "The session was closed.", code="closed")


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The limits of one turn, besides those of the policy."""

    decode: Decode
    """Decodes sampled tokens; returns None where the policy knows no tokens."""
    max_tokens: int
    """Maximum number of tokens."""
    stops: tuple[str, ...] = ()
    """Texts that end it."""

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Return whether the turn ends after these tokens."""
        if len(token_ids) >= self.max_tokens or not self.stops:
            return len(token_ids) >= self.max_tokens
        width = max(len(stop.encode("utf-8", "replace")) for stop in self.stops) + _EXTRA_TOKENS
        return self._find_stop(self.decode(token_ids[-width:])) is not None

    def cut(self, generation: Generation, max_tokens: int) -> tuple[Generation, str | None]:
        """Cut a turn at its end; the tokens up to there stay as sampled."""
        ids = generation.completion_ids
        num_tokens = min(len(ids), max_tokens, self.max_tokens)
        if self.stops and self._find_stop(self.decode(ids)) is not None:
            first = bisect.bisect(
                range(1, len(ids) + 1),
                False,
                key=lambda n: self._find_stop(self.decode(ids[:n])) is not None,
            )
            num_tokens = min(num_tokens, first + 1)
        if num_tokens < len(ids):
            generation = replace(
                generation,
                completion_ids=ids[:num_tokens],
                logprobs=generation.logprobs[:num_tokens],
                text=self.decode(ids[:num_tokens]) or "",
                finish_reason="length",
            )
        place = self._find_stop(generation.text)
        if place is None:
            return generation, None
        return replace(generation, finish_reason="stop"), generation.text[:place]

    def _find_stop(self, text: str | None) -> int | None:
        """Return where the first stop text begins."""
        places = [text.find(stop) for stop in self.stops] if text else []
        return min((place for place in places if place >= 0), default=None)


class GenerationLoop:
    """Serves calls through streams of one policy."""

    def __init__(self, policy: Policy, num_sessions: Callable[[], int]) -> None:
        """Serve with `policy`; `num_sessions` returns the number of open sessions."""
        self._policy, self._num_sessions = policy, num_sessions
        self._queue: queue.SimpleQueue[tuple[int, _Call | None]] = queue.SimpleQueue()
        self._running: dict[int, _Call] = {}

    def submit(self, key: int, request: GenerationRequest) -> Future[Generation]:
        """Request a turn; `key` has none running. Cancel it with `drop`, not through the future."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((key, (request, future)))
        return future

    def drop(self, key: int) -> None:
        """Cancel the call of `key` and release what the stream keeps for it."""
        self._queue.put((key, None))

    def run(
        self, is_active: Callable[[], bool], is_any_active: Callable[[bool], bool] = bool
    ) -> None:
        """Generate in this thread while `is_active`; see `Rollout` for `is_any_active`.

        Calls that are unfinished at the end start again in the next run.
        """
        stream = self._policy.open_stream()
        try:
            for key, (request, _) in self._running.items():
                stream.add(key, request)
            while is_any_active(is_active()):
                is_busy = is_any_active(stream.has_requests)
                self._take_calls(stream, is_busy=is_busy)
                if is_busy:
                    for key, result in stream.advance():
                        stream.mark_idle(key)  # its program may never call again
                        self._finish(key, result)
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            stream.close()

    def refuse_all(self, error: BaseException) -> None:
        """Fail all queued and running calls with `error`, while no thread runs the loop."""
        while not self._queue.empty():
            key, call = self._queue.get()
            if call is None:
                self._finish(key, _CLOSED)
            else:
                self._running[key] = call
        self._fail_all(error)

    def _take_calls(self, stream: GenerationStream, *, is_busy: bool) -> None:
        """Take queued calls; wait for one while idle, and for more before a wave."""
        gather_seconds = GATHER_SECONDS if stream.gathers else 0.0
        until = time.monotonic() + gather_seconds
        while True:
            left = until - time.monotonic()
            waits = left > 0 and len(self._running) < self._num_sessions()
            try:
                if is_busy and not waits:
                    key, call = self._queue.get_nowait()
                else:
                    key, call = self._queue.get(timeout=left if is_busy else IDLE_SECONDS)
            except queue.Empty:
                return
            if not is_busy:
                is_busy, until = True, time.monotonic() + gather_seconds
            if call is None:
                self._finish(key, _CLOSED)
                stream.drop(key)
            else:
                self._add(stream, key, call)

    def _add(self, stream: GenerationStream, key: int, call: _Call) -> None:
        self._running[key] = call
        try:
            prompt_ids = self._policy.encode(call[0])
        except Exception as error:  # noqa: BLE001 - a template may refuse a program's messages
            text = f"The messages cannot be rendered: {error}"
            return self._finish(key, ApiError(400, text))
        if prompt_ids is None:
            return self._finish(key, Generation(text="", finish_reason="overflow"))
        stream.add(key, call[0])

    def _finish(self, key: int, result: Generation | BaseException) -> None:
        _, future = self._running.pop(key, (None, None))
        if future is None:  # cancelled
            return
        if isinstance(result, Generation):
            future.set_result(result)
        else:
            future.set_exception(_as_api_error(result))

    def _fail_all(self, error: BaseException) -> None:
        failure = _as_api_error(error) if self._running else error
        for key in [*self._running]:
            self._finish(key, failure)


def _as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    _log.warning("The policy failed.", exc_info=error)
    text = f"The policy failed: {type(error).__name__}: {error}"
    return ApiError(500, text, code="policy_error", stop_reason=StopReason.POLICY_ERROR)
