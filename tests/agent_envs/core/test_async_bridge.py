import asyncio
import multiprocessing
import os
import sys
import threading
import time

import pytest

from agent_envs.core.async_bridge import CallSession, call_with_deadline, resolve
from agent_envs.core.tool import tool


async def running_loop():
    return asyncio.get_running_loop()


def test_an_awaitable_is_cancelled_after_its_timeout():
    ended = threading.Event()

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        resolve(hang(), timeout=0.05)
    assert ended.wait(5.0)


def test_a_coroutine_that_blocks_the_loop_delays_no_caller_past_its_timeout():
    gate = threading.Event()

    async def block():
        gate.wait()

    thread = threading.Thread(target=lambda: resolve(block()), daemon=True)
    thread.start()
    time.sleep(0.05)
    with pytest.raises(TimeoutError):
        resolve(running_loop(), timeout=0.1)
    gate.set()
    thread.join()
    assert resolve(running_loop()) is not None


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no"), TimeoutError("its own")])
def test_an_exception_is_raised_in_the_caller_and_the_loop_continues(error):
    async def fail():
        raise error

    before = resolve(running_loop())
    with pytest.raises(type(error)) as raised:
        resolve(fail())
    assert repr(raised.value) == repr(error)
    assert resolve(running_loop()) is before


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("is_awaited", [True, False])
def test_an_exit_in_a_child_task_ends_its_own_coroutine_alone(is_awaited, error):
    async def leave():
        await asyncio.sleep(0)
        raise error

    async def program():
        child = asyncio.create_task(leave())
        await (child if is_awaited else asyncio.sleep(30))

    async def innocent():
        await asyncio.gather(*(asyncio.sleep(0.3) for _ in range(3)))
        return "done"

    session = CallSession()
    session.submit(0, lambda: resolve(innocent(), timeout=10))
    with pytest.raises(type(error)):
        resolve(program(), timeout=10)
    assert session.wait(10.0)[0].value == "done"


def test_code_on_the_loop_can_wait_for_async_code():
    @tool
    async def double(a: int) -> int:
        """Double."""
        await asyncio.sleep(0)
        return 2 * a

    async def inner():
        return double.run(a=2).content

    async def outer():
        return resolve(inner())  # an async environment with async tools

    assert resolve(outer(), timeout=10.0) == "4"
    assert asyncio.run(inner()) == "4"


def test_calls_run_concurrently_and_are_reported_as_they_end():
    session, gates = CallSession(), [threading.Event() for _ in range(3)]
    for key, gate in enumerate(gates):
        session.submit(key, lambda key=key, gate=gate: gate.wait(10) and 10 * key)
    reported = []
    for key in (1, 2, 0):
        gates[key].set()
        reported += [(outcome.key, outcome.value) for outcome in session.wait(10.0)]
    assert reported == [(1, 10), (2, 20), (0, 0)]
    assert not session
    assert session.wait(5.0) == []  # nothing to wait for


def test_a_call_that_hangs_is_abandoned_after_its_own_timeout():
    session, gate, outcomes = CallSession(), threading.Event(), {}
    session.submit(0, gate.wait, timeout=0.05)
    session.submit(1, lambda: "done", timeout=0.05)
    time.sleep(0.3)  # as long as a policy may take: what ended in time counts
    while session:
        outcomes |= {outcome.key: outcome for outcome in session.wait(5.0)}
    assert outcomes[1].value == "done"
    assert "0.05 seconds" in str(outcomes[0].error)
    gate.set()
    session.submit(0, lambda: "second")
    assert [outcome.value for outcome in session.wait(5.0)] == ["second"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_starts_its_own_threads():
    async def seven():
        return 7

    assert call_with_deadline(seven, 5.0) == 7
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(call_with_deadline(seven, 5.0))
    )
    child.start()
    child.join(20.0)
    assert child.exitcode == 7
