"""The level ``container``: one docker or podman container per program.

Much slower to start than the level ``strong``; for machines that offer containers but no
namespaces to their users.
"""

import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from agent_envs.errors import SandboxUnavailableError
from agent_envs.sandbox.launching import ENVIRONMENT, python_command
from agent_envs.sandbox.plain import PlainLauncher
from agent_envs.sandbox.results import Level, Limits

ENGINES: Final = ("docker", "podman")
DEFAULT_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_PROBE_SECONDS: Final = 30.0
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


class ContainerLauncher(PlainLauncher):
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
        self._packages = [str(folder) for folder in packages]
        self._is_closed = False
        if not _succeeds([self._engine, "image", "inspect", image]):
            raise SandboxUnavailableError(
                NO_IMAGE_TEXT.format(engine=Path(self._engine).name, image=image)
            )

    def start(
        self, channels: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], None]:
        """Start a container (see `Launcher`)."""
        name = f"agent-envs-{uuid.uuid4().hex}"
        config = {"packages": [f"/packages/{i}" for i in range(len(self._packages))]}
        end = self._start(channels, control, self._command(name, limits), config)

        def clean_up() -> None:
            if not end():
                _succeeds([self._engine, "rm", "--force", name])

        return clean_up

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
        return [self._engine, "run", *options, self._image, *python_command()[1:]]


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
