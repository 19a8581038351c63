"""One event loop, in a thread of its own, on which everything ``async`` of this process runs.

So clients, locks and connections that are bound to a loop can be shared by tools, environments and
episodes, and many of them wait at once.
"""

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Awaitable
from typing import Any, Final

BLOCKED_SECONDS: Final = 5.0
"""A loop in which one thing alone has run for so long is blocked, and replaced."""
_LOOKS: Final = 10
"""How often it is looked at within this time."""

_log = logging.getLogger(__name__)


class _Loop:
    """An event loop, and the thread in which it runs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True, name="event-loop")
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_current: _Loop | None = None
_lock = threading.Lock()


def resolve(value: Any, timeout: float | None = None) -> Any:
    """Return `value`, or what it gives where it has to be awaited first.

    Args:
        value: Anything, such as what a function returned that may be ``async``.
        timeout: Seconds to wait; then it is cancelled. None for no limit.

    Raises:
        TimeoutError: If it took longer.
        Exception: Whatever it raised.
    """
    return _wait(value, timeout) if inspect.isawaitable(value) else value


def _wait(awaitable: Awaitable[Any], timeout: float | None) -> Any:
    while True:
        current = _shared_loop()
        if threading.current_thread() is current.thread:
            # Waiting here would stop the loop; an async environment with async tools comes this way
            return _wait_elsewhere(awaitable, timeout)
        start = _Start()
        future = asyncio.run_coroutine_threadsafe(_outcome(awaitable, start), current.loop)
        if _begins(start, current.loop) or not start.claim.acquire(blocking=False):
            break
        _leave(current)
    try:
        value, error = future.result(timeout)
    except TimeoutError:
        future.cancel()
        raise
    if error is not None:
        raise error
    return value


def _begins(start: "_Start", loop: asyncio.AbstractEventLoop) -> bool:
    """Wait until a coroutine begins; return False if something in its loop does not give way.

    A loop may be slow because much runs in it: clients that are bound to it would fail in another.
    """
    running, num_same = None, 0
    while not start.event.wait(BLOCKED_SECONDS / _LOOKS):
        task = asyncio.current_task(loop)
        num_same = num_same + 1 if task is running else 0
        running = task
        if num_same == _LOOKS:
            _log.warning("The event loop is replaced: this has not given way: %r", running)
            return False
    return True


def _wait_elsewhere(awaitable: Awaitable[Any], timeout: float | None) -> Any:
    outcomes: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        limited = asyncio.wait_for(_outcome(awaitable), timeout)
        try:
            outcomes.append(asyncio.run(limited))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcomes.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="event-loop-inner")
    thread.start()
    thread.join()
    ((value, error),) = outcomes
    if error is not None:
        raise error
    return value


class _Start:
    """Settles whether a coroutine begins in a loop, or its caller looks for another loop."""

    def __init__(self) -> None:
        self.claim = threading.Lock()
        self.event = threading.Event()


async def _outcome(
    awaitable: Awaitable[Any], start: _Start | None = None
) -> tuple[Any, BaseException | None]:
    """Await; what would stop the loop (``sys.exit``) goes to whoever waits."""
    if start is not None:
        if not start.claim.acquire(blocking=False):
            return None, None
        start.event.set()
    try:
        return await awaitable, None
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - raised by _wait
        return None, error


def _shared_loop() -> _Loop:
    global _current
    with _lock:
        if _current is None:
            _current = _Loop()
        return _current


def _leave(loop: _Loop) -> None:
    global _current
    with _lock:
        if _current is loop:
            _current = None


def _forget() -> None:
    """Begin anew in a forked process, which has the loop, but not its thread."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
