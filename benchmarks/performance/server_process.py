"""A server of ours in a process of its own, which can be ended and started again on its port."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import httpx

_STARTING_SECONDS: Final = 60.0


class ServerProcess:
    """``python -m`` a module that serves at ``--port``."""

    def __init__(self, *command: str, **variables: str) -> None:
        """Choose a port; start with `start`.

        Args:
            command: The module, and its arguments.
            variables: Variables of the environment that the process has besides ours.
        """
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
        until = time.monotonic() + _STARTING_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/health")
                return
            time.sleep(0.05)
        self.end(kill=True)
        raise RuntimeError("The server did not start.")

    def end(self, *, kill: bool = False) -> None:
        """End it: told to, so that it answers what it has taken, or killed."""
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
