"""Run a foreign function and wait for it no longer than its deadline."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def call_with_deadline(function: Callable[[], Any], timeout: float | None) -> Any:
    """Call `function` and return its result, or stop waiting after `timeout`.

    A Python thread cannot be killed: past the deadline the call is abandoned in a daemon thread,
    which keeps neither the caller nor the end of the process waiting.

    Args:
        function: Sync or async, called without arguments.
        timeout: Seconds to wait; ``None`` calls in this thread and waits for ever, which is
            right only for code known to return quickly.

    Raises:
        TimeoutError: If `function` did not return in time.
        Exception: Whatever `function` raised.
    """
    if timeout is None:
        return _resolve(function)
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = _resolve(function)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name="deadline").start()
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # the function itself raised a TimeoutError
            raise
        raise TimeoutError(f"no result within {timeout:g} seconds") from None


def _resolve(function: Callable[[], Any]) -> Any:
    result = function()
    return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(awaitable: Any) -> Any:
    return await awaitable
