"""How programs are started: the levels ``limits`` and ``container``, and the start of our modules.

Modules are sent as text over standard input. So a sandbox needs no file of ours, and neither the
command line nor a traceback shows where this package is installed.

``limits`` hides nothing: the program has the network, and this user's files and rights. Its
environment is clean, its directory is separate, and its processes end with it, unless it actively
evades that. ``container``, by docker or podman, is for machines without namespaces for their users;
it starts much slower than ``strong``.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.archive import remove_tree
from agent_envs.sandbox.results import Level, Limits

BOOTSTRAP: Final = """
import json, os, sys
def read(length):
    data = b""
    while len(data) < length:
        data += os.read(0, length - len(data)) or sys.exit(70)
    return data
payload = json.loads(read(int(read(10))))
for name, source in payload["modules"]:
    module = sys.modules[name] = type(sys)(name)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
sys.modules[payload["main"]].main(payload["config"])
"""
ENVIRONMENT: Final = {
    "HOME": "/scratch",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # or each thread takes 64 MB of address space
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/scratch",
}
"""All the variables that a program sees."""
PYTHON_FLAGS: Final = ("-P", "-s", "-S", "-B", "-X", "utf8")
"""As ``-I -S``, but with our environment variables: they fix the order of sets for every run."""
ENGINES: Final = ("docker", "podman")
DEFAULT_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_PACKAGE: Final = "agent_envs.sandbox"
_MODULES: Final = ("judging", "program", "archive", "usage", "supervisor")
_PROBE_SECONDS: Final = 30.0
_END_SECONDS: Final = 20.0
_SUPERVISOR_MB: Final = 64
_SUPERVISOR_PROCESSES: Final = 4


Started: TypeAlias = tuple[socket.socket, Callable[[], object]]
"""The connection to a supervisor, which waits for its request there, and what cleans up.

A launcher's method `start` returns it, and raises `SandboxError` if that is impossible.
"""


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

    def start(self, limits: Limits) -> Started:
        """Start a supervisor, which sets the limits."""
        del limits
        folder = tempfile.mkdtemp(prefix="agent-envs-scratch-")
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        try:
            control, end = self._start(
                python_command(), {"scratch": folder}, env=environment, cwd=folder
            )
        except SandboxError:
            remove_tree(folder)
            raise

        def clean_up() -> None:
            end()
            remove_tree(folder)  # if the supervisor could not

        return control, clean_up

    def _start(
        self, command: Sequence[str], config: dict[str, Any], **options: Any
    ) -> tuple[socket.socket, Callable[[], bool]]:
        """Start `supervisor.main`; return also what ends it and tells if it ended by itself."""
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        try:
            process, control = start_module(command, "supervisor", config, **options)
        except OSError as error:
            raise SandboxError(f"A program could not be started: {error}") from error
        return control, lambda: end_process(process, _END_SECONDS)

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

    def start(self, limits: Limits) -> Started:
        """Start a container with a supervisor."""
        name, memory = f"agent-envs-{uuid.uuid4().hex}", f"{limits.memory_mb + _SUPERVISOR_MB}m"
        options = (
            f"--rm --interactive --name={name} --pull=never --network=none --read-only "
            "--cap-drop=ALL --security-opt=no-new-privileges --user=65534:65534 --ipc=private "
            f"--log-driver=none --oom-score-adj=1000 --memory={memory} --memory-swap={memory} "
            f"--pids-limit={limits.processes + _SUPERVISOR_PROCESSES} "
            f"--tmpfs=/scratch:rw,exec,nosuid,nodev,size={limits.scratch_mb}m,mode=1777 "
            "--workdir=/scratch --entrypoint=python3"  # without a log, which would be on disk
        ).split()
        options += [f"--env={key}={value}" for key, value in ENVIRONMENT.items()]
        command = [self._engine, "run", *options, self._image, *python_command()[1:]]
        control, end = self._start(command, {})
        return control, lambda: end() or _succeeds([self._engine, "rm", "--force", name])


def python_command() -> list[str]:
    """Return the command of the real interpreter, not of a virtual environment's link to it."""
    return [os.path.realpath(sys.executable), *PYTHON_FLAGS, "-c", BOOTSTRAP]


def start_module(
    command: Sequence[str], module: str, config: dict[str, Any], **options: Any
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a command that runs `BOOTSTRAP`, and with it ``main(config)`` of one of our modules.

    Return it with a connection to its standard input and output, unless `options` of
    `subprocess.Popen` say otherwise.
    """
    folder, names = Path(__file__).parent, dict.fromkeys([*_MODULES, module])
    modules = [["agent_envs", ""], [_PACKAGE, ""]]
    modules += [[f"{_PACKAGE}.{n}", (folder / f"{n}.py").read_text("utf-8")] for n in names]
    text = json.dumps({"main": f"{_PACKAGE}.{module}", "config": config, "modules": modules})
    ours, theirs = socket.socketpair()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.DEVNULL, **options}
    try:
        # In a session of its own: an interrupt at the terminal is for the host alone.
        process = subprocess.Popen(command, start_new_session=True, **streams)  # noqa: S603
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    with contextlib.suppress(OSError):  # it ended; the caller notices
        ours.sendall(f"{len(text):010d}{text}".encode())
    return process, ours


def end_process(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for the end of a process, and kill it after `seconds`; return whether it ended alone."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def _succeeds(command: Sequence[str]) -> bool:
    try:
        subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return True
