"""The level ``limits``: a subprocess with limits on time, memory, processes and output.

It hides nothing: the program has the network, and this user's files and rights. Its environment is
clean, its directory is its own, and its processes end with it, unless it actively evades that.
"""

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.archive import remove_tree
from agent_envs.sandbox.launching import ENVIRONMENT, end_process, python_command, start_module
from agent_envs.sandbox.results import Level, Limits


class PlainLauncher:
    """Starts a supervisor, and through it a program, as plain processes."""

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
        self, descriptors: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], None]:
        """Start a supervisor in a new temporary directory (see `Launcher`)."""
        del limits  # the supervisor sets them
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        folder = tempfile.mkdtemp(prefix="agent-envs-scratch-")
        inherited = [control.fileno(), *descriptors]
        config = {
            "control": control.fileno(),
            "descriptors": list(descriptors),
            "packages": self._packages,
            "scratch": folder,
        }
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        try:
            process, stdin = start_module(
                python_command(), "supervisor", config,
                env=environment, cwd=folder, pass_fds=inherited,
            )  # fmt: skip
        except OSError as error:
            remove_tree(folder)
            raise SandboxError(f"A program could not be started: {error}") from error
        with contextlib.suppress(BrokenPipeError):
            stdin.close()

        def clean_up() -> None:
            end_process(process, 20.0)
            remove_tree(folder)

        return clean_up

    def close(self) -> None:
        """Start no more programs; running ones end with their callers."""
        self._is_closed = True
