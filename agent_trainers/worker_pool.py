"""Threads that run foreign code side by side, none of which can hold the others up for good."""

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

START_LIMIT: Final = 2
STALL_SECONDS: Final = 0.02
"""If no call ends for this long while others wait for their turn, more may run at once."""

_Results = queue.SimpleQueue[tuple[int, Any]]
_Calls = queue.SimpleQueue[tuple[_Results, int, Callable[[], Any]]]


class WorkerPool:
    """Daemon threads, more of them at work only while calls make others wait.

    Calls that compute take turns on few threads, which spares Python's interpreter lock; calls that
    wait for something soon run all at once. Unlike with ``ThreadPoolExecutor``, a call that never
    returns costs its own thread only: no later call waits for it, nor does the end of the process.
    """

    def __init__(self) -> None:
        """Start without threads; they come when calls do."""
        self._calls: _Calls = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0

    def run(self, calls: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
        """Run `calls` side by side and return what each returned or raised.

        Args:
            calls: Functions without arguments.
            timeout: Seconds to wait for all of them together; a call that is not done by then is
                a ``TimeoutError`` in the result, and is left to itself.
        """
        results: _Results = queue.SimpleQueue()
        outcomes: list[Any] = [TimeoutError(f"no result within {timeout:g} seconds")] * len(calls)
        waiting = collections.deque(enumerate(calls))
        limit, num_running, num_done = START_LIMIT, 0, 0
        deadline = time.monotonic() + timeout
        while num_done < len(calls) and (left := deadline - time.monotonic()) > 0:
            while waiting and num_running < limit:
                self._submit(results, *waiting.popleft())
                num_running += 1
            try:
                i, outcomes[i] = results.get(timeout=min(STALL_SECONDS, left))
            except queue.Empty:
                limit *= 2
            else:
                num_running -= 1
                num_done += 1
        return outcomes

    def _submit(self, results: _Results, i: int, call: Callable[[], Any]) -> None:
        with self._lock:
            if self._num_idle > 0:
                self._num_idle -= 1
            else:
                threading.Thread(target=self._work, daemon=True, name="rollout").start()
        self._calls.put((results, i, call))

    def _work(self) -> None:
        while True:
            results, i, call = self._calls.get()
            try:
                outcome = call()
            except BaseException as error:  # noqa: BLE001 - foreign code; handed to the caller
                outcome = error
            with self._lock:  # idle before its result is known, or the next call starts a thread
                self._num_idle += 1
            results.put((i, outcome))
            del results, call, outcome  # or the last call's objects would live until the next one
