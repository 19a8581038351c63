"""The level ``container``: one docker or podman container per program.

Slower to start by far than the level ``strong``, and the way out where a machine offers
containers but no namespaces to its users.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.limits import Level, Limits
from agent_envs.sandbox.multiplexer import CONTROL, Multiplexer
from agent_envs.sandbox.payload import BOOTSTRAP, ENVIRONMENT, PYTHON_FLAGS, make_payload

ENGINES: Final = ("docker", "podman")
DEFAULT_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"

_PROBE_SECONDS: Final = 30.0
_END_SECONDS: Final = 20.0
_OVERHEAD_MB: Final = 64
"""What the supervisor takes, beside the program."""
_OVERHEAD_PROCESSES: Final = 4

UNAVAILABLE_TEXT: Final = (
    "level='container' needs a working docker or podman ({reason}). Install one (`apt install "
    "podman`, or https://docs.docker.com/engine/install) and see that `{engine} info` works for "
    "this user; or use level='strong', which needs nothing installed, or, for code you trust, "
    "level='limits'."
)
NO_IMAGE_TEXT: Final = (
    "level='container': {engine} does not have the image {image!r}. Get it with `{engine} pull "
    "{image}`, or name another one that holds Python 3.11 or newer with image=."
)


class ContainerLauncher:
    """Starts each program in a new container."""

    level: Level = "container"

    def __init__(self, packages: Sequence[Path] = (), image: str = DEFAULT_IMAGE) -> None:
        """Look for an engine that works and has the image.

        Args:
            packages: Folders of Python packages that programs may import.
            image: An image that holds ``python3``.

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
        """Start a container, and a thread that passes its streams along (see `Launcher`)."""
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        name = f"agent-envs-{uuid.uuid4().hex}"
        try:
            process = subprocess.Popen(  # noqa: S603
                self._command(name, limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{self._engine} could not be started: {error}") from error
        assert process.stdin is not None  # noqa: S101 - they are pipes
        assert process.stdout is not None  # noqa: S101
        streams = {number: os.dup(descriptor) for number, descriptor in enumerate(descriptors)}
        streams[CONTROL] = os.dup(control.fileno())
        link_in, link_out = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        config = {
            "descriptors": len(descriptors),
            "packages": [f"/packages/{i}" for i in range(len(self._packages))],
        }
        with process.stdin as stdin, process.stdout:
            stdin.write(make_payload("multiplexer", config, ["multiplexer"]))
        multiplexer = Multiplexer(link_in, link_out, streams, ends_with_control=False)
        thread = threading.Thread(target=multiplexer.run, name=name, daemon=True)
        thread.start()
        return partial(self._clean_up, process, thread, name)

    def close(self) -> None:
        """Start no more containers; those that run end with their callers."""
        self._is_closed = True

    def _command(self, name: str, limits: Limits) -> list[str]:
        memory = f"{limits.memory_mb + _OVERHEAD_MB}m"
        scratch = f"rw,exec,nosuid,nodev,size={limits.scratch_mb}m,mode=1777"
        options = [
            "--rm",
            "--interactive",
            f"--name={name}",
            "--pull=never",
            "--network=none",
            "--read-only",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--user=65534:65534",
            "--ipc=private",
            "--log-driver=none",  # or the engine keeps the output on disk
            "--oom-score-adj=1000",
            f"--memory={memory}",
            f"--memory-swap={memory}",
            f"--pids-limit={limits.processes + _OVERHEAD_PROCESSES}",
            f"--tmpfs=/scratch:{scratch}",
            "--workdir=/scratch",
            "--entrypoint=python3",
        ]
        options += [f"--env={key}={value}" for key, value in ENVIRONMENT.items()]
        options += [f"--volume={f}:/packages/{i}:ro" for i, f in enumerate(self._packages)]
        return [self._engine, "run", *options, self._image, *PYTHON_FLAGS, "-c", BOOTSTRAP]

    def _clean_up(
        self, process: "subprocess.Popen[bytes]", thread: threading.Thread, name: str
    ) -> None:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            _succeeds([self._engine, "rm", "--force", name])
            process.kill()
            process.wait()
        thread.join(_END_SECONDS)


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
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
