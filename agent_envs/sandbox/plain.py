"""The level ``limits``: a subprocess with limits on time, memory, processes and output.

It hides nothing: the program has the network, and this user's files and rights. Its environment
is clean, its directory is its own, and its processes end with it, unless it works against that.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox import tree
from agent_envs.sandbox.limits import Level, Limits
from agent_envs.sandbox.payload import (
    BOOTSTRAP,
    ENVIRONMENT,
    PYTHON_FLAGS,
    make_payload,
    python_executable,
)

_END_SECONDS: Final = 20.0


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
        folder = Path(tempfile.mkdtemp(prefix="agent-envs-scratch-"))
        config: dict[str, Any] = {
            "control": control.fileno(),
            "descriptors": list(descriptors),
            "packages": self._packages,
            "scratch": str(folder),
        }
        try:
            process = subprocess.Popen(  # noqa: S603
                [python_executable(), *PYTHON_FLAGS, "-c", BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**ENVIRONMENT, "HOME": str(folder), "TMPDIR": str(folder)},
                cwd=folder,
                pass_fds=[control.fileno(), *descriptors],
                start_new_session=True,
            )
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            with process.stdin as stdin:
                stdin.write(make_payload("supervisor", config))
        except OSError as error:
            _remove(folder)
            raise SandboxError(f"A program could not be started: {error}") from error
        return partial(_clean_up, process, folder)

    def close(self) -> None:
        """Start no more programs; those that run end with their callers."""
        self._is_closed = True


def _clean_up(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the scratch directory, unless the supervisor did; what is left then is not ours."""
    with contextlib.suppress(OSError):
        tree.remove(str(folder))
