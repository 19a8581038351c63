"""The level ``container``: one docker or podman container per program.

Much slower to start than the level ``strong``; for machines that offer containers but no
namespaces to their users.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox import relay
from agent_envs.sandbox.launching import (
    BOOTSTRAP,
    ENVIRONMENT,
    PYTHON_FLAGS,
    end_process,
    start_module,
)
from agent_envs.sandbox.results import Level, Limits

ENGINES: Final = ("docker", "podman")
DEFAULT_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_PROBE_SECONDS: Final = 30.0
_END_SECONDS: Final = 20.0
_SUPERVISOR_MB: Final = 64
_SUPERVISOR_PROCESSES: Final = 4

UNAVAILABLE_TEXT: Final = (
    "level='container' needs a working docker or podman ({reason}). Install one (`apt install "
    "podman`, or https://docs.docker.com/engine/install) and check that `{engine} info` works for "
    "this user; or use level='strong', which needs nothing installed, or, for code you trust, "
    "level='limits'."
)
NO_IMAGE_TEXT: Final = (
    "level='container': {engine} does not have the image {image!r}. Get it with `{engine} pull "
    "{image}`, or name another one that contains Python 3.11 or newer with image=."
)


class ContainerLauncher:
    """Starts each program in a new container."""

    level: Level = "container"

    def __init__(self, packages: Sequence[Path] = (), image: str = DEFAULT_IMAGE) -> None:
        """Look for an engine that works and has the image.

        Args:
            packages: Folders of Python packages that programs may import.
            image: An image that contains ``python3``.

        Raises:
            SandboxUnavailableError: If there is none.
        """
        self._engine, self._image = _find_engine(), image
        self._packages = list(packages)
        self._is_closed = False
        if not _succeeds([self._engine, "image", "inspect", image]):
            raise SandboxUnavailableError(
                NO_IMAGE_TEXT.format(engine=Path(self._engine).name, image=image)
            )

    def start(
        self, descriptors: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], None]:
        """Start a container, and threads that relay its streams (see `Launcher`)."""
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        name = f"agent-envs-{uuid.uuid4().hex}"
        packages = [f"/packages/{i}" for i in range(len(self._packages))]
        config = {"channels": len(descriptors) - 2, "packages": packages}
        try:
            process, stdin = start_module(
                self._command(name, limits), "relay", config, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise SandboxError(f"{self._engine} could not be started: {error}") from error
        stdout = cast("socket.SocketIO", process.stdout)
        streams = {number: os.dup(descriptor) for number, descriptor in enumerate(descriptors, 1)}
        streams[relay.CONTROL] = os.dup(control.fileno())
        sockets = {number: each for number, each in streams.items() if number not in (1, 2)}
        ends = [
            threading.Thread(target=relay.forward, args=(sockets, stdin.fileno()), daemon=True),
            threading.Thread(target=relay.receive, args=(streams, stdout.fileno()), daemon=True),
        ]
        for thread in ends:
            thread.start()

        def clean_up() -> None:
            if not end_process(process, _END_SECONDS):
                _succeeds([self._engine, "rm", "--force", name])
            for thread in ends:
                thread.join(_END_SECONDS)
            stdin.close()
            stdout.close()
            for descriptor in streams.values():
                os.close(descriptor)

        return clean_up

    def close(self) -> None:
        """Start no more containers; running ones end with their callers."""
        self._is_closed = True

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
        options += [f"--volume={f}:/packages/{i}:ro" for i, f in enumerate(self._packages)]
        return [self._engine, "run", *options, self._image, *PYTHON_FLAGS, "-c", BOOTSTRAP]


def _find_engine() -> str:
    """Return the path of the first engine that answers."""
    found = [path for name in ENGINES if (path := shutil.which(name))]
    for path in found:
        if _succeeds([path, "info"]):
            return path
    reason = f"`{Path(found[0]).name} info` fails" if found else "neither is installed"
    engine = Path(found[0]).name if found else ENGINES[0]
    raise SandboxUnavailableError(UNAVAILABLE_TEXT.format(reason=reason, engine=engine))


def _succeeds(command: Sequence[str]) -> bool:
    try:
        done = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_PROBE_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
