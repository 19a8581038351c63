"""The project's scheduling code under simpy's clock: its threads are simpy processes.

`virtual_time` replaces the clock, thread pool, locks and queues of the modules that schedule
rollouts. Everything else in them runs unchanged; a wait of days takes as long as one event.
"""

import contextlib
import functools
import queue
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import simpy
import torch
from greenlet import getcurrent, greenlet

from agent_envs.core import async_bridge
from agent_trainers.policies import policy
from agent_trainers.rollout import collector
from agent_trainers.trainers import async_rollouts


class VirtualTime:
    """A clock, and threads that run one at a time until they wait."""

    def __init__(self) -> None:
        self.events = simpy.Environment()

    def monotonic(self) -> float:
        """Return the virtual time in seconds."""
        return float(self.events.now)

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Let other threads run for `seconds`."""
        self.wait_for(self.events.timeout(seconds))

    def wait_for(self, event: simpy.Event) -> Any:
        """Let other threads run until an event, and return its value; called in a thread."""
        return getcurrent().parent.switch(event)

    def submit(self, function: Callable[[], Any]) -> "VirtualFuture":
        """Call `function` in a new thread."""
        future = VirtualFuture(self)

        def work() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised again where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)

        self.events.process(self._run(work))
        return future

    def _run(self, work: Callable[[], None]) -> Generator[simpy.Event, Any, None]:
        thread = greenlet(work)
        event = thread.switch()
        while not thread.dead:
            event = thread.switch((yield event))

    def wait(self, futures: Sequence["VirtualFuture"], seconds: float, _: str) -> None:
        """Wait until one of the futures is done, at most `seconds`."""
        ends = [future.event for future in futures]
        self.wait_for(self.events.any_of([*ends, self.events.timeout(seconds)]))

    def run(self, *functions: Callable[[], Any]) -> list[Any]:
        """Run all functions in threads to their end; return their results."""
        futures = [self.submit(function) for function in functions]
        for future in futures:
            self.events.run(future.event)
        return [future.result() for future in futures]


class VirtualFuture:
    """A `concurrent.futures.Future` in virtual time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self.event = time, time.events.event()

    def done(self) -> bool:
        """Return whether there is a result."""
        return bool(self.event.triggered)

    def set_result(self, value: Any) -> None:
        """Set the result."""
        self.event.succeed((value, None))

    def set_exception(self, error: BaseException) -> None:
        """Set the error."""
        self.event.succeed((None, error))

    def result(self) -> Any:
        """Wait for the result."""
        if not self.event.triggered:
            self._time.wait_for(self.event)
        value, error = self.event.value
        if error is not None:
            raise error
        return value


class VirtualLock:
    """A lock that threads get in the order of their requests."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._requests = time, deque[simpy.Event]()

    def __enter__(self) -> None:  # noqa: D105
        self._requests.append(self._time.events.event())
        if len(self._requests) > 1:
            self._time.wait_for(self._requests[-1])

    def __exit__(self, *_: object) -> None:  # noqa: D105
        self._requests.popleft()
        if self._requests:
            self._requests[0].succeed()


class VirtualQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._store = time, simpy.Store(time.events)

    def put(self, item: Any) -> None:
        """Add an item."""
        self._store.put(item)

    def get(self, *, block: bool = True) -> Any:
        """Take the oldest item; without one wait, or raise `queue.Empty`."""
        if not (block or self._store.items):
            raise queue.Empty
        return self._time.wait_for(self._store.get())


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    """Run the scheduling code in virtual time within the block, called by `VirtualTime.run`."""
    time = VirtualTime()
    call = collector._Call
    kinds = {"SimpleQueue": functools.partial(VirtualQueue, time), "Empty": queue.Empty}
    replaced: dict[Any, dict[str, Any]] = {
        async_bridge: {"time": time, "submit": time.submit, "wait": time.wait},
        policy: {"threading": SimpleNamespace(Lock=functools.partial(VirtualLock, time))},
        collector: {
            "time": time, "submit": time.submit, "queue": SimpleNamespace(**kinds),
            "_Call": lambda *fields: call(*fields, done=VirtualFuture(time)),
        },
        async_rollouts: {"submit": time.submit},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        # Virtual threads share the mode of a real one, and may leave `no_grad` in another order.
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        for module, names in replaced.items():
            stack.enter_context(patch.multiple(module, **names))
        yield time
