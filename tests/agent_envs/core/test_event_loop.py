import asyncio
import threading
import time

import pytest

from agent_envs.core import event_loop
from agent_envs.core.event_loop import resolve
from agent_envs.core.tool import tool


async def running_loop():
    return asyncio.get_running_loop()


def in_threads(count, function):
    results = []
    threads = [threading.Thread(target=lambda: results.append(function())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_is_no_awaitable_is_returned_as_it_is():
    assert resolve(3) == 3


def test_everything_runs_in_one_loop_and_waits_at_once():
    async def wait():
        await asyncio.sleep(0.3)
        return asyncio.get_running_loop()

    started = time.monotonic()
    loops = in_threads(20, lambda: resolve(wait()))
    assert time.monotonic() - started < 3  # one after the other would take 6 s
    assert set(loops) == {resolve(running_loop())}


def test_what_takes_too_long_is_cancelled():
    ended = threading.Event()

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        resolve(hang(), timeout=0.05)
    assert ended.wait(5.0)


def test_a_loop_that_is_blocked_is_replaced(monkeypatch):
    monkeypatch.setattr(event_loop, "BLOCKED_SECONDS", 0.1)
    gate = threading.Event()

    async def block():
        gate.wait()  # never gives way

    blocked = resolve(running_loop())
    thread = threading.Thread(target=lambda: resolve(block()), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert resolve(running_loop()) is not blocked
    gate.set()
    thread.join()


def test_a_loop_in_which_much_runs_is_kept(monkeypatch):
    # What is bound to a loop, as the connections of a client are, would fail in another one.
    monkeypatch.setattr(event_loop, "BLOCKED_SECONDS", 0.1)

    async def work():
        time.sleep(0.04)
        return asyncio.get_running_loop()

    before = resolve(running_loop())
    assert set(in_threads(10, lambda: resolve(work()))) == {before}
    assert resolve(running_loop()) is before


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no"), TimeoutError("its own")])
def test_what_is_raised_goes_to_whoever_waits_and_the_loop_goes_on(error):
    async def fail():
        raise error

    before = resolve(running_loop())
    with pytest.raises(type(error)) as raised:
        resolve(fail())
    assert raised.value is error
    assert resolve(running_loop()) is before


def test_waiting_inside_of_the_loop_does_not_stop_it():
    async def outer():
        return resolve(inner())

    async def inner():
        return "inside"

    assert resolve(outer(), timeout=5.0) == "inside"


def test_async_tools_share_what_is_bound_to_a_loop():
    gates = []

    @tool
    async def meet() -> str:
        """Wait for the others."""
        gates.append(asyncio.Event())
        if len(gates) == 4:
            for gate in gates:
                gate.set()
        await gates[-1].wait()
        return "met"

    results = in_threads(4, lambda: meet.run().content)
    assert results == ["met"] * 4


def test_an_async_tool_may_be_called_from_a_running_loop():
    @tool(timeout=None)
    async def double(a: int) -> int:
        """Double."""
        await asyncio.sleep(0)
        return 2 * a

    async def notebook():
        return double(a=2).content

    assert asyncio.run(notebook()) == "4"
