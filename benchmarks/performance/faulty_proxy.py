"""A proxy on loopback that breaks some of what it hands on: for tests of clients."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

GARBAGE: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n<html>a gateway</html>"
SLOW_SECONDS: Final = 0.5


class FaultyProxy:
    """Hands requests on to a port, and draws for each whether something happens to it.

    ``drop`` closes the connection, ``garbage`` answers with a page in HTML, ``slow`` waits first.
    """

    def __init__(self, port: int, shares: Mapping[str, float], *, seed: int = 0) -> None:
        """Stand before `port`; `shares` says how often each fault happens."""
        self._target, self._shares = port, dict(shares)
        self._rng = np.random.default_rng(seed)
        self._loop = asyncio.new_event_loop()
        self.port = 0
        self.counts: Counter[str] = Counter()
        """How often each fault happened."""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Listen while the block runs; yield the URL."""
        started = threading.Event()
        thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        thread.start()
        started.wait()
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        server = self._loop.run_until_complete(listening)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back: asyncio.Task[None] | None = None
        behind: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.CancelledError):  # the end of `running`
            while piece := await reader.read(65_536):
                fault = self._draw()
                if fault == "slow":
                    await asyncio.sleep(SLOW_SECONDS)
                if fault == "garbage":
                    writer.write(GARBAGE)
                    await writer.drain()
                if fault in ("drop", "garbage"):
                    break
                if behind is None:
                    answers, behind = await asyncio.open_connection("127.0.0.1", self._target)
                    back = asyncio.create_task(_hand_back(answers, writer))
                behind.write(piece)
                await behind.drain()
        if back is not None:
            back.cancel()
        for side in (behind, writer):
            if side is not None:
                side.close()

    def _draw(self) -> str | None:
        chance = self._rng.random()
        for fault, share in self._shares.items():
            if chance < share:
                self.counts[fault] += 1
                return fault
            chance -= share
        return None


async def _hand_back(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await answers.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()
