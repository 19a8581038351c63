"""Threads that run foreign code side by side, none of which can hold the others up for good."""

import heapq
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a call."""

    key: int
    """Whose call it was."""
    value: Any
    """What it returned; None where it failed."""
    error: BaseException | None
    """What it raised, or a ``TimeoutError``."""
    seconds: float
    """How long it took."""


@dataclass(slots=True)
class _Call:
    key: int
    function: Callable[[], Any]
    outcomes: "queue.SimpleQueue[tuple[_Call, Outcome]]"
    started: float = field(default_factory=time.monotonic)


class WorkerPool:
    """Daemon threads, as many as calls run at once, kept for the next ones.

    Unlike with ``ThreadPoolExecutor``, a call that never returns costs its own thread only: no
    later call waits for it, nor does the end of the process.
    """

    def __init__(self) -> None:
        """Start without threads; they come when calls do."""
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0

    def session(self) -> "CallSession":
        """Return a place to submit calls to and to wait for them."""
        return CallSession(self)

    def submit(self, call: _Call) -> None:
        """Let a thread run the call."""
        with self._lock:
            if self._num_idle > 0:
                self._num_idle -= 1
            else:
                threading.Thread(target=self._work, daemon=True, name="rollout").start()
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            started = time.perf_counter()
            value, error = None, None
            try:
                value = call.function()
            except BaseException as raised:  # noqa: BLE001 - foreign code; handed to the caller
                error = raised
            seconds = time.perf_counter() - started
            with self._lock:  # idle before its result is known, or the next call starts a thread
                self._num_idle += 1
            outcome = Outcome(key=call.key, value=value, error=error, seconds=seconds)
            call.outcomes.put((call, outcome))
            del call, value, error, outcome  # or they would live until the next call


class CallSession:
    """Calls that belong together, one at a time for each key, each with a deadline of its own."""

    def __init__(self, pool: WorkerPool) -> None:
        """Run calls in `pool`."""
        self._pool = pool
        self._outcomes: queue.SimpleQueue[tuple[_Call, Outcome]] = queue.SimpleQueue()
        self._running: dict[int, _Call] = {}
        self._deadlines: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return how many calls are under way."""
        return len(self._running)

    def submit(self, key: int, function: Callable[[], Any], timeout: float = math.inf) -> None:
        """Run `function` in another thread.

        Args:
            key: Whose call it is.
            function: Called without arguments.
            timeout: Seconds after which it is given up and left to itself.
        """
        call = _Call(key, function, self._outcomes)
        self._running[key] = call
        heapq.heappush(self._deadlines, (call.started + timeout, next(self._numbers), call))
        self._pool.submit(call)

    def abandon(self, key: int) -> None:
        """Leave a call to itself; its outcome is not reported."""
        self._running.pop(key, None)

    def wait(self, seconds: float) -> list[Outcome]:
        """Return what has ended, once something has, or after `seconds`; 0 does not wait."""
        outcomes = self._over()
        until = time.monotonic() + seconds
        while not outcomes and self._running:
            left = min(until, self._deadlines[0][0]) - time.monotonic()
            outcomes = self._ended(max(0.0, left)) + self._over()
            if time.monotonic() >= until:
                break
        return outcomes

    def _over(self) -> list[Outcome]:
        """Return what has ended, and then what is late: nobody may have looked in between."""
        outcomes = []
        while ended := self._ended(0.0):
            outcomes += ended
        return outcomes + self._expired()

    def _ended(self, seconds: float) -> list[Outcome]:
        try:
            call, outcome = (
                self._outcomes.get(timeout=seconds) if seconds else (self._outcomes.get_nowait())
            )
        except queue.Empty:
            return []
        if self._running.get(call.key) is not call:
            return [] if seconds else self._ended(0.0)  # given up before it ended
        del self._running[call.key]
        return [outcome]

    def _expired(self) -> list[Outcome]:
        expired = []
        while self._deadlines:
            deadline, _, call = self._deadlines[0]
            is_running = self._running.get(call.key) is call
            now = time.monotonic()
            if is_running and deadline > now:
                break
            heapq.heappop(self._deadlines)
            if is_running:
                del self._running[call.key]
                seconds = now - call.started
                error = TimeoutError(f"no result within {deadline - call.started:g} seconds")
                expired.append(Outcome(key=call.key, value=None, error=error, seconds=seconds))
        return expired
