"""Levels with one supervisor process per program; the level ``limits`` is the plainest of them.

It hides nothing: the program has the network, and this user's files and rights. Its environment is
clean, its directory is separate, and its processes end with it, unless it actively evades that.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox import relay
from agent_envs.sandbox.archive import remove_tree
from agent_envs.sandbox.launching import ENVIRONMENT, end_process, python_command, start_module
from agent_envs.sandbox.results import Level, Limits

_END_SECONDS: Final = 20.0


class PlainLauncher:
    """Starts a supervisor, and through it a program; threads relay their streams."""

    level: Level = "limits"

    def __init__(self, packages: Sequence[Path] = ()) -> None:
        """Start programs that may import from `packages`.

        Raises:
            SandboxUnavailableError: If the system is not Linux.
        """
        if sys.platform != "linux":
            raise SandboxUnavailableError(
                f"level='limits' needs Linux; this is {sys.platform}. Use level='container'."
            )
        self._packages = [str(folder) for folder in packages]
        self._is_closed = False

    def start(
        self, channels: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], None]:
        """Start a supervisor (see `Launcher`)."""
        del limits  # the supervisor sets them
        folder = tempfile.mkdtemp(prefix="agent-envs-scratch-")
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        config = {"packages": self._packages, "scratch": folder}
        try:
            end = self._start(
                channels, control, python_command(), config, env=environment, cwd=folder
            )
        except SandboxError:
            remove_tree(folder)
            raise

        def clean_up() -> None:
            end()
            remove_tree(folder)  # if the supervisor could not

        return clean_up

    def _start(
        self,
        channels: Sequence[int],
        control: socket.socket,
        command: Sequence[str],
        config: dict[str, Any],
        **options: Any,
    ) -> Callable[[], bool]:
        """Start `relay.main` by a command; return what ends it and tells if it ended by itself."""
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        config["channels"] = len(channels)
        try:
            process, stdin = start_module(
                command, "relay", config, stdout=subprocess.PIPE, **options
            )
        except OSError as error:
            raise SandboxError(f"A program could not be started: {error}") from error
        stdout = cast("IO[bytes]", process.stdout)
        streams = [os.dup(descriptor) for descriptor in (control.fileno(), *channels)]
        relays = relay.start(streams, stdin.fileno(), stdout.fileno())

        def end() -> bool:
            ended_alone = end_process(process, _END_SECONDS)
            for thread in relays:
                thread.join(_END_SECONDS)
            for file in (stdin, stdout):
                file.close()
            for descriptor in streams:
                os.close(descriptor)
            return ended_alone

        return end

    def close(self) -> None:
        """Start no more programs; running ones end with their callers."""
        self._is_closed = True
