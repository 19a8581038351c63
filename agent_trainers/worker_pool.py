"""Threads that run foreign code side by side, none of which can hold the others up for good."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

STALL_SECONDS: Final = 0.02
"""If no call ends for this long while others wait for a thread, there are too few threads."""

_Results = queue.SimpleQueue[tuple[int, Any]]
_Calls = queue.SimpleQueue[tuple[_Results, int, Callable[[], Any]]]


class WorkerPool:
    """Daemon threads that multiply only while calls wait.

    Calls that compute share few threads, which spares Python's interpreter lock; calls that wait
    for something get a thread each. Unlike with ``ThreadPoolExecutor``, a call that never returns
    costs its own thread only: no later call waits for it, and neither does the end of the process.
    """

    def __init__(self) -> None:
        """Start without threads; they come when calls do."""
        self._calls: _Calls = queue.SimpleQueue()
        self._num_threads = 0

    def run(self, calls: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
        """Run `calls` side by side and return what each returned or raised.

        Args:
            calls: Functions without arguments.
            timeout: Seconds to wait for all of them together; a call that is not done by then is
                a ``TimeoutError`` in the result, and is left to itself.
        """
        results: _Results = queue.SimpleQueue()
        for i, call in enumerate(calls):
            self._calls.put((results, i, call))
        outcomes: list[Any] = [TimeoutError(f"no result within {timeout:g} seconds")] * len(calls)
        deadline = time.monotonic() + timeout
        num_done = 0
        while num_done < len(calls) and (left := deadline - time.monotonic()) > 0:
            try:
                i, outcomes[i] = results.get(timeout=min(STALL_SECONDS, left))
                num_done += 1
            except queue.Empty:
                self._add_threads()
        return outcomes

    def _add_threads(self) -> None:
        """Double the threads, but start no more than there are calls that wait for one."""
        for _ in range(min(max(1, self._num_threads), self._calls.qsize())):
            threading.Thread(target=_work, args=(self._calls,), daemon=True, name="rollout").start()
            self._num_threads += 1


def _work(calls: _Calls) -> None:
    while True:
        results, i, call = calls.get()
        try:
            outcome = call()
        except BaseException as error:  # noqa: BLE001 - foreign code; handed to the caller
            outcome = error
        results.put((i, outcome))
        del results, call, outcome  # or the last call's objects would live until the next one
