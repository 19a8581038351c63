"""Run foreign functions, side by side, and wait for each no longer than its deadline.

A Python thread cannot be killed: past its deadline a call is left to itself in a daemon thread,
which keeps neither the caller nor the end of the process waiting. Threads whose call has ended take
the next one: to start a thread costs more than most calls.
"""

import contextlib
import contextvars
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.event_loop import resolve

MAX_IDLE_WORKERS: Final = 128
"""So many threads wait for calls at most; more end with theirs."""


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


@dataclass(slots=True, eq=False)
class _Call:
    key: int
    timeout: float
    started: float


class _Worker:
    """A thread that runs one job after the other."""

    def __init__(self) -> None:
        """Start without a job."""
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="deadline").start()

    def _work(self) -> None:
        while True:
            # In a context of its own, so that no call sees what another has set.
            contextvars.Context().run(self.jobs.get())
            if len(_idle_workers) >= MAX_IDLE_WORKERS:
                return
            _idle_workers.append(self)


_idle_workers: list[_Worker] = []
if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_idle_workers.clear)


def _run_in_a_thread(job: Callable[[], None]) -> None:
    """Run `job`, which raises nothing, in an idle thread or else in a new one."""
    try:
        worker = _idle_workers.pop()
    except IndexError:
        worker = _Worker()
    worker.jobs.put(job)


class CallSession:
    """Calls that belong together, one at a time for each key, each in a thread to itself."""

    def __init__(self) -> None:
        """Start without calls."""
        self._ended: queue.SimpleQueue[tuple[_Call, Outcome]] = queue.SimpleQueue()
        self._running: dict[int, _Call] = {}

    def __len__(self) -> int:
        """Return how many calls are under way."""
        return len(self._running)

    def submit(self, key: int, function: Callable[[], Any], timeout: float = math.inf) -> None:
        """Run `function` in another thread; give it up after `timeout` seconds."""
        call = self._running[key] = _Call(key, timeout, time.monotonic())

        def run() -> None:
            self._ended.put((call, outcome_of(key, function)))

        _run_in_a_thread(run)

    def abandon(self, key: int) -> None:
        """Leave a call to itself; its outcome is not reported."""
        self._running.pop(key, None)

    def wait(self, seconds: float) -> list[Outcome]:
        """Return what has ended, once something has, or after `seconds`; 0 does not wait."""
        outcomes = self._drain()
        until = time.monotonic() + seconds
        while not outcomes and self._running:
            first = min(call.started + call.timeout for call in self._running.values())
            outcomes = self._drain(max(0.0, min(until, first) - time.monotonic()))
            if time.monotonic() >= until:
                break
        return outcomes

    def _drain(self, seconds: float = 0.0) -> list[Outcome]:
        """Return what has ended, after `seconds` at most, and then what is late.

        In this order: a call that ended in time counts however late somebody looks.
        """
        outcomes = []
        with contextlib.suppress(queue.Empty):
            while True:
                call, outcome = self._ended.get(timeout=seconds)
                seconds = 0.0
                if self._running.get(call.key) is call:  # else it was given up before it ended
                    del self._running[call.key]
                    outcomes.append(outcome)
        return outcomes + self._expired()

    def _expired(self) -> list[Outcome]:
        now, outcomes = time.monotonic(), []
        for call in [c for c in self._running.values() if c.started + c.timeout <= now]:
            del self._running[call.key]
            error = TimeoutError(f"no result within {call.timeout:g} seconds")
            seconds = now - call.started
            outcomes.append(Outcome(key=call.key, value=None, error=error, seconds=seconds))
        return outcomes


def outcome_of(
    key: int,
    function: Callable[[], Any],
    caught: tuple[type[BaseException], ...] = (BaseException,),
) -> Outcome:
    """Call `function` in this thread; what it raises is part of the outcome."""
    value: Any = None
    error: BaseException | None = None
    started = time.perf_counter()
    try:
        value = function()
    except caught as raised:
        error = raised
    return Outcome(key=key, value=value, error=error, seconds=time.perf_counter() - started)


def call_with_deadline(function: Callable[[], Any], timeout: float | None) -> Any:
    """Call `function` and return its result, or stop waiting after `timeout`.

    Args:
        function: Sync or async, called without arguments.
        timeout: Seconds to wait; ``None`` calls in this thread and waits for ever, which is
            right only for code known to return quickly.

    Raises:
        TimeoutError: If `function` did not return in time.
        Exception: Whatever `function` raised.
    """
    if timeout is None:
        return resolve(function())
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    _run_in_a_thread(lambda: ended.put(outcome_of(0, lambda: resolve(function(), timeout))))
    try:
        outcome = ended.get(timeout=min(timeout, threading.TIMEOUT_MAX))
    except queue.Empty:
        raise TimeoutError(f"no result within {timeout:g} seconds") from None
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
