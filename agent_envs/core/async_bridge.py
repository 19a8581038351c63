"""Run foreign functions, sync or async, in other threads and with a timeout.

Async code of the whole process runs on one event loop in a daemon thread, so that clients, locks
and connections that are bound to a loop can be shared by tools, environments and episodes. Sync
code runs in a pool of daemon threads. A thread cannot be killed: after its timeout a call is
abandoned, and delays neither its caller nor the end of the process.
"""

import asyncio
import contextvars
import inspect
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Final

MAX_IDLE_THREADS: Final = 128
"""Threads that the pool keeps for later calls."""

_loop_depth = contextvars.ContextVar("loop_depth", default=0)
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def resolve(value: Any, timeout: float | None = None) -> Any:
    """Return `value`, or the result of awaiting it, for at most `timeout` seconds.

    Code that runs on the shared loop may call this, too, although it blocks that loop: what it
    waits for runs on a second loop.
    """
    if not inspect.isawaitable(value):
        return value
    depth = _loop_depth.get()
    future = asyncio.run_coroutine_threadsafe(_await_at(depth + 1, value), _loop_at(depth))
    try:
        return future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise


async def _await_at(depth: int, awaitable: Awaitable[Any]) -> Any:
    _loop_depth.set(depth)
    caller = _Caller(asyncio.current_task())
    _caller.set(caller)
    try:
        return await awaitable
    except asyncio.CancelledError:
        if caller.exit is None:
            raise
        raise caller.exit from None


@dataclass(slots=True)
class _Caller:
    """A coroutine on a shared loop, from which tasks inherit that it is theirs."""

    task: "asyncio.Task[Any] | None"
    exit: BaseException | None = None
    """The exit that one of its tasks called."""


_caller: contextvars.ContextVar[_Caller | None] = contextvars.ContextVar("caller", default=None)
_callers: "weakref.WeakKeyDictionary[asyncio.Future[Any], _Caller]" = weakref.WeakKeyDictionary()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
    task = asyncio.Task(coroutine, loop=loop, **options)
    if (caller := _caller.get()) is not None:
        _callers[task] = caller
    return task


def _loop_at(depth: int) -> asyncio.AbstractEventLoop:
    """Return the loop for code that was called from `depth` loops, all of which may be blocked."""
    with _loops_lock:
        if depth not in _loops:
            loop = _loops[depth] = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(loop,), daemon=True).start()
        return _loops[depth]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.set_task_factory(_make_task)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio stores it as the result of the task that raised it, then stops the loop
            _end_caller(error)


def _end_caller(error: BaseException) -> None:
    """End the coroutine, one of whose tasks has exited; all others on the loop continue."""
    for task, caller in list(_callers.items()):
        has_exited = task.done() and not task.cancelled() and task.exception() is error
        if has_exited and caller.task is not None and not caller.task.done():
            caller.exit = error
            caller.task.cancel()


class Worker:
    """A daemon thread that runs submitted functions one after the other."""

    def __init__(self) -> None:
        """Start the thread; it ends after `stop`, or when this object is garbage-collected."""
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="worker").start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Call `function` in the thread, after all that was submitted before."""
        future: Future[Any] = Future()
        self._jobs.put((future, contextvars.copy_context(), function))
        return future

    def stop(self) -> None:
        """End the thread after all that was submitted before."""
        self._jobs.put(None)


def _work(jobs: "queue.SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        future, context, function = job
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is read
            future.set_exception(error)
        else:
            future.set_result(result)
        job = future = context = function = result = None  # keep nothing alive while waiting


_idle_workers: list[Worker] = []


def submit(function: Callable[[], Any]) -> "Future[Any]":
    """Call `function` in an idle thread of the pool, or in a new one."""
    try:
        worker = _idle_workers.pop()
    except IndexError:
        worker = Worker()

    def release(_: "Future[Any]") -> None:
        if len(_idle_workers) < MAX_IDLE_THREADS:
            _idle_workers.append(worker)

    future = worker.submit(function)
    future.add_done_callback(release)
    return future


def _reset_after_fork() -> None:
    """Forget all threads: a forked process does not inherit them."""
    global _loops_lock
    _loops_lock = threading.Lock()
    _loops.clear()
    _idle_workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def call_with_deadline(function: Callable[[], Any], timeout: float | None) -> Any:
    """Call `function`, sync or async, and return its result.

    After `timeout` seconds it raises a TimeoutError; ``None`` calls in this thread and waits
    without a limit, which is right only for code known to return quickly.
    """
    if timeout is None:
        return resolve(function())
    future = submit(lambda: resolve(function(), timeout))
    try:
        return future.result(min(timeout, threading.TIMEOUT_MAX))
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no result within {timeout:g} seconds") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a call: a value, or the exception that ended it (a timeout is a TimeoutError)."""

    key: int
    value: Any = None
    error: BaseException | None = None
    seconds: float


def outcome_of(
    key: int,
    function: Callable[[], Any],
    caught: tuple[type[BaseException], ...] = (BaseException,),
) -> Outcome:
    """Call `function` in this thread; an exception in `caught` becomes part of the outcome."""
    value, error = None, None
    started = time.perf_counter()
    try:
        value = function()
    except caught as raised:
        error = raised
    return Outcome(key=key, value=value, error=error, seconds=time.perf_counter() - started)


class CallSession:
    """Concurrent calls, at most one per key, each in its own thread."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Future[Outcome], float, float]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, key: int, function: Callable[[], Any], timeout: float = math.inf) -> None:
        """Run `function` in another thread; abandon it after `timeout` seconds."""
        future = submit(lambda: outcome_of(key, function))
        self._running[key] = future, time.monotonic(), timeout

    def abandon(self, key: int) -> None:
        """Ignore the outcome of a call."""
        self._running.pop(key, None)

    def wait(self, seconds: float) -> list[Outcome]:
        """Return the outcomes so far, or wait up to `seconds` for the next; 0 only polls."""
        until = time.monotonic() + seconds
        while not (outcomes := self._collect()) and self._running:
            now, calls = time.monotonic(), self._running.values()
            if now >= until:
                break
            first = min(until, *(start + limit for _, start, limit in calls))
            left = max(0.0, min(first - now, threading.TIMEOUT_MAX))
            wait([future for future, *_ in calls], left, FIRST_COMPLETED)
        return outcomes

    def _collect(self) -> list[Outcome]:
        now, outcomes = time.monotonic(), []
        for key, (future, start, limit) in list(self._running.items()):
            if future.done():  # even after its timeout: the caller may poll late
                outcomes.append(future.result())
            elif start + limit <= now:
                error = TimeoutError(f"no result within {limit:g} seconds")
                outcomes.append(Outcome(key=key, error=error, seconds=now - start))
        for outcome in outcomes:
            del self._running[outcome.key]
        return outcomes
