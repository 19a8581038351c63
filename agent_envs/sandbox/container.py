"""Levels with a supervisor process per program: ``limits``, and ``container`` by docker or podman.

``limits`` hides nothing: the program has the network, and this user's files and rights. Its
environment is clean, its directory is separate, and its processes end with it, unless it actively
evades that. ``container`` is for machines without namespaces for their users; it starts much slower
than ``strong``.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox import relay
from agent_envs.sandbox.archive import remove_tree
from agent_envs.sandbox.launching import ENVIRONMENT, end_process, python_command, start_module
from agent_envs.sandbox.results import Level, Limits

ENGINES: Final = ("docker", "podman")
DEFAULT_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_PROBE_SECONDS: Final = 30.0
_END_SECONDS: Final = 20.0
_SUPERVISOR_MB: Final = 64
_SUPERVISOR_PROCESSES: Final = 4


class PlainLauncher:
    """The level ``limits``: starts a supervisor, and through it a program."""

    level: Level = "limits"
    _is_closed = False

    def __init__(self) -> None:
        """Check the system; raise SandboxUnavailableError if it is not Linux."""
        if sys.platform != "linux":
            raise SandboxUnavailableError(
                f"level='limits' needs Linux; this is {sys.platform}. Use level='container'."
            )

    def start(
        self, channels: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], object]:
        """Start a supervisor (see `launching.Start`)."""
        del limits  # the supervisor sets them
        folder = tempfile.mkdtemp(prefix="agent-envs-scratch-")
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        try:
            end = self._start(
                channels, control, python_command(), scratch=folder, env=environment, cwd=folder
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
        scratch: str | None = None,
        **options: Any,
    ) -> Callable[[], bool]:
        """Start `relay.main` by a command; return what ends it and tells if it ended by itself."""
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        config = {"channels": len(channels)} | ({"scratch": scratch} if scratch else {})
        try:
            process = start_module(command, "relay", config, stdout=subprocess.PIPE, **options)
        except OSError as error:
            raise SandboxError(f"A program could not be started: {error}") from error
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        files = [process.stdin, process.stdout]
        streams = [socket.socket(fileno=os.dup(one)) for one in (control.fileno(), *channels)]
        relays = relay.start(streams, *(file.fileno() for file in files))

        def end() -> bool:
            ended_alone = end_process(process, _END_SECONDS)
            for thread in relays:
                thread.join(_END_SECONDS)
            for file in files:
                file.close()
            for stream in streams:
                stream.close()
            return ended_alone

        return end

    def close(self) -> None:
        """Start no more programs; running ones end with their callers."""
        self._is_closed = True


class ContainerLauncher(PlainLauncher):
    """The level ``container``: starts each program in a new container."""

    level: Level = "container"

    def __init__(self, image: str = DEFAULT_IMAGE) -> None:
        """Look for an engine that has the image; raise SandboxUnavailableError without one."""
        found = [path for name in ENGINES if (path := shutil.which(name))]
        self._engine = next((path for path in found if _succeeds([path, "info"])), "")
        self._image = image
        if not self._engine:
            reason = f"`{found[0]} info` fails" if found else "neither is installed"
            raise SandboxUnavailableError(
                f"level='container' needs a working docker or podman ({reason}), e.g. by `apt "
                "install podman`. Or use level='strong', which needs nothing installed, or, for "
                "code you trust, level='limits'."
            )
        if not _succeeds([self._engine, "image", "inspect", image]):
            raise SandboxUnavailableError(
                f"level='container': there is no image {image!r}. Get it with `{self._engine} pull "
                f"{image}`, or name another one with Python 3.11 or newer with image=."
            )

    def start(
        self, channels: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], object]:
        """Start a container (see `launching.Start`)."""
        name = f"agent-envs-{uuid.uuid4().hex}"
        end = self._start(channels, control, self._command(name, limits))
        return lambda: end() or _succeeds([self._engine, "rm", "--force", name])

    def _command(self, name: str, limits: Limits) -> list[str]:
        memory = f"{limits.memory_mb + _SUPERVISOR_MB}m"
        options = (
            f"--rm --interactive --name={name} --pull=never --network=none --read-only "
            "--cap-drop=ALL --security-opt=no-new-privileges --user=65534:65534 --ipc=private "
            f"--log-driver=none --oom-score-adj=1000 --memory={memory} --memory-swap={memory} "
            f"--pids-limit={limits.processes + _SUPERVISOR_PROCESSES} "
            f"--tmpfs=/scratch:rw,exec,nosuid,nodev,size={limits.scratch_mb}m,mode=1777 "
            "--workdir=/scratch --entrypoint=python3"  # without a log, which would be on disk
        ).split()
        options += [f"--env={key}={value}" for key, value in ENVIRONMENT.items()]
        return [self._engine, "run", *options, self._image, *python_command()[1:]]


def _succeeds(command: Sequence[str]) -> bool:
    try:
        subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return True
