"""A thread in which one environment is made, played and closed."""

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Work = tuple[Future[Any], Callable[[], Any]] | None


class OwnThread:
    """Does one thing after the other, in a thread that ends with it or with the process."""

    def __init__(self) -> None:
        """Start the thread; it keeps no process from ending."""
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_do, args=(self._work,), daemon=True, name="member")
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Call `function` after what was submitted before."""
        future: Future[Any] = Future()
        self._work.put((future, function))
        return future

    def stop(self) -> None:
        """End the thread after what was submitted."""
        self._work.put(None)

    def interrupt(self) -> None:
        """Raise `SystemExit` in the thread, as soon as it is in Python code again."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))


def _do(work: queue.SimpleQueue[_Work]) -> None:
    while (item := work.get()) is not None:
        future, function = item
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - the half that waits decides
            future.set_exception(error)
        else:
            future.set_result(result)
        del item, future, function  # so that nothing is kept alive while waiting
