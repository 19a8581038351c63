"""Servers under faults: a restartable server process, and a proxy that breaks requests."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import httpx
import numpy as np

GARBAGE: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n<html>a gateway</html>"
SLOW_SECONDS: Final = 0.5
_START_SECONDS: Final = 60.0


class ServerProcess:
    """A process of ``python -m`` a module that serves at ``--port``."""

    def __init__(self, *command: str, **variables: str) -> None:
        """Choose a port for a module and its arguments, with additional environment variables."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", *command, "--port", str(self.port)]
        self._variables = os.environ | variables
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self._command, stdout=subprocess.DEVNULL, env=self._variables
        )
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/health")
                return
            time.sleep(0.05)
        self.end(kill=True)
        raise RuntimeError(f"The server did not start: {' '.join(self._command)}")

    def end(self, *, kill: bool = False) -> None:
        """Terminate it gracefully, or kill it."""
        if self._process is not None:
            (self._process.kill if kill else self._process.terminate)()
            self._process.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run while the block does."""
        self.start()
        try:
            yield
        finally:
            self.end(kill=True)


class FaultyProxy:
    """Forward requests to a local port, some of them with faults.

    ``drop`` closes the connection, ``garbage`` answers with HTML, ``slow`` waits first.
    """

    def __init__(self, port: int, shares: Mapping[str, float], *, seed: int = 0) -> None:
        """Forward to `port` with the probability of each fault."""
        self._target, self._shares = port, dict(shares)
        self._rng = np.random.default_rng(seed)
        self._loop = asyncio.new_event_loop()
        self.port = 0
        self.counts: Counter[str] = Counter()
        """Number of requests by fault."""

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
        target: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.CancelledError):  # the end of `running`
            while data := await reader.read(65_536):
                fault = self._draw()
                if fault == "slow":
                    await asyncio.sleep(SLOW_SECONDS)
                if fault == "garbage":
                    writer.write(GARBAGE)
                    await writer.drain()
                if fault in ("drop", "garbage"):
                    break
                if target is None:
                    answers, target = await asyncio.open_connection("127.0.0.1", self._target)
                    back = asyncio.create_task(_forward(answers, writer))
                target.write(data)
                await target.drain()
        if back is not None:
            back.cancel()
        for side in (target, writer):
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


async def _forward(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await answers.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
