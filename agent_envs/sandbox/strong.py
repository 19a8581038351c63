"""The level ``strong``: namespaces, a read-only view of the system, and a system-call filter.

A zygote (`agent_envs.sandbox.zygote`) is started once and forks per program. Nothing has to be
installed; the Linux kernel must let this user create namespaces.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.execution import Execution
from agent_envs.sandbox.launching import (
    ENVIRONMENT,
    Started,
    end_process,
    python_command,
    start_module,
)
from agent_envs.sandbox.results import Level, Limits
from agent_envs.sandbox.seccomp import build_filter

_START_SECONDS: Final = 30.0
_OLDEST_KERNEL: Final = (5, 14)
"""From this version on, the limit on processes counts per user namespace, so per program."""
UNAVAILABLE_TEXT: Final = (
    "This machine offers no strong isolation for untrusted code ({reason}). It needs Linux 5.14 "
    "or newer and user namespaces for this user; nothing has to be installed. To allow them: on "
    "Ubuntu `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, on older Debian `sudo "
    "sysctl -w kernel.unprivileged_userns_clone=1`, in Docker `--security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined --cap-add SYS_ADMIN`. Or accept another level: "
    "level='container' runs each program with docker or podman, and level='limits' only limits "
    "time and memory and hides nothing: for code you trust."
)

PROBE: Final = """
import json, os, socket, sys
seen = []
def attempt(sight, function, *arguments):
    try:
        function(*arguments)
        seen.append(sight)
    except OSError:
        pass
attempt("a file of the host", open, CANARY)
for family in (socket.AF_INET, socket.AF_UNIX):
    attempt("a socket", socket.socket, family)
for path in ("/probe", "/usr/probe", "/etc/probe", "/dev/probe", "/proc/probe"):
    attempt(f"write access to {path}", open, path, "w")
if os.getppid() != 1 or [n for n in os.listdir("/proc") if n.isdigit()] != [str(os.getpid())]:
    seen.append("other processes")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
rights = [status[name].strip().lstrip("0") for name in ("CapEff", "NoNewPrivs", "Seccomp")]
if os.getuid() == 0 or rights != ["", "1", "2"]:
    seen.append("more rights than it should")
print(json.dumps(seen))
"""
"""Tries to see what it must not see; `StrongLauncher` requires that it finds nothing."""


class StrongLauncher:
    """Starts each program in its own namespaces."""

    level: Level = "strong"

    def __init__(self) -> None:
        """Start the zygote and test it; raise SandboxUnavailableError if that is impossible."""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        if sys.platform != "linux":
            raise _unavailable(f"this is {sys.platform}, not Linux")
        release = os.uname().release
        if tuple(map(int, release.split("-")[0].split(".")[:2])) < _OLDEST_KERNEL:
            raise _unavailable(f"its kernel is {release}")
        self._is_closed = False
        self._config = {"home": str(Path.home()), "seccomp": build_filter().hex()}
        self._process, self._socket = _start_zygote(self._config)
        try:
            self._test()
        except BaseException:
            self.close()
            raise

    def start(self, limits: Limits) -> Started:
        """Let the zygote fork; the supervisor sets the limits."""
        del limits
        control, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._is_closed:
                control.close()
                raise SandboxError("The sandbox is closed.")
            try:
                socket.send_fds(self._socket, [b"r"], [theirs.fileno()])
            except OSError:  # someone killed the zygote: the machine, out of memory, perhaps
                self._end_zygote()
                self._process, self._socket = _start_zygote(self._config)
                socket.send_fds(self._socket, [b"r"], [theirs.fileno()])
        return control, lambda: None  # the scratch directory disappears with its namespace

    def close(self) -> None:
        """End the zygote; every program ends with it."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._end_zygote()

    def _end_zygote(self) -> None:
        self._socket.close()
        if self._owner == os.getpid():  # not in a fork of the process that owns it
            end_process(self._process, _START_SECONDS)

    def _test(self) -> None:
        """Run `PROBE`: whether isolation holds is tested, not assumed."""
        with tempfile.NamedTemporaryFile(prefix="agent-envs-canary-") as canary:
            source, limits = f"CANARY = {canary.name!r}\n{PROBE}", Limits(wall_seconds=20.0)
            try:
                with Execution(self, "python", source, limits) as probe:
                    result = probe.finish()
            except SandboxError as error:
                raise _unavailable(str(error)) from None
        if result.status != "ok" or json.loads(result.stdout):
            raise _unavailable(f"a probe found {result.stdout.strip()} {result.stderr[-300:]}")


def _start_zygote(config: dict[str, Any]) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    process, ours = start_module(
        python_command(), "zygote", config,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT, cwd="/",
    )  # fmt: skip
    ours.settimeout(_START_SECONDS)
    assert process.stderr is not None  # noqa: S101 - it is a pipe
    answer = b""
    with process.stderr as stderr:
        with contextlib.suppress(OSError):
            answer = ours.recv(1)
        if not answer:
            ours.close()
            end_process(process, _START_SECONDS)
            os.set_blocking(stderr.fileno(), False)  # a child of the zygote may keep it open
            reason = (stderr.read() or b"").decode(errors="replace").strip().rpartition("\n")[2]
            raise _unavailable(reason or "the sandbox's process did not start")
    ours.settimeout(None)
    return process, ours


def _unavailable(reason: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(UNAVAILABLE_TEXT.format(reason=reason))
