"""Levels of isolation: how their supervisors are started.

``strong``: namespaces, a read-only view of the system, and a system-call filter. A zygote
(`agent_envs.sandbox.zygote`) is started once and forks per program. Nothing has to be installed;
the Linux kernel must let this user create namespaces.

``container``, by docker or podman, is for machines without that; it starts much slower. ``gvisor``
is a container whose system calls gVisor's own kernel answers, where the engine has it (``runsc``).

``limits`` hides nothing: the program has the network, and this user's files and rights. Its
environment is clean, its directory is separate, and its processes end with it, unless it actively
evades that.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.archive import remove_tree
from agent_envs.sandbox.control_groups import ControlGroup
from agent_envs.sandbox.execution import Execution
from agent_envs.sandbox.results import Level, Limits
from agent_envs.sandbox.seccomp import build_filter

# Modules are sent as text over standard input. So a sandbox needs no file of ours, and neither the
# command line nor a traceback shows where this package is installed.
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
DEFAULT_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_PACKAGE: Final = "agent_envs.sandbox"
_MODULES: Final = ("judging", "program", "archive", "usage", "supervisor")
_PROBE_SECONDS: Final = 30.0
_END_SECONDS: Final = 20.0
_SUPERVISOR_MB: Final = 64
_SUPERVISOR_PROCESSES: Final = 4
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

Started: TypeAlias = tuple[socket.socket, Callable[[], object]]
"""The connection to a supervisor, which waits for its request there, and what cleans up.

A launcher's method `start` returns it, and raises `SandboxError` if that is impossible.
"""


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
        filters = [build_filter(notifies=notifies).hex() for notifies in (True, False)]
        self._config = {"home": str(Path.home()), "seccomp": filters}
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
            group = ControlGroup()
            given = [theirs.fileno(), *group.descriptors]
            try:
                socket.send_fds(self._socket, [b"r"], given)
            except OSError:  # someone killed the zygote: the machine, out of memory, perhaps
                self._end_zygote()
                self._process, self._socket = _start_zygote(self._config)
                socket.send_fds(self._socket, [b"r"], given)
            group.close()
        return control, group.remove  # the scratch directory disappears with its namespace

    def close(self) -> None:
        """End the zygote; every program ends with it."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._end_zygote()

    def _end_zygote(self) -> None:
        self._socket.close()
        if self._owner == os.getpid():  # not in a fork of the process that owns it
            end_process(self._process)

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
        group = ControlGroup()
        try:
            control, end = self._start(
                python_command(), group.descriptors, env=environment, cwd=folder
            )
        except SandboxError:
            group.remove()
            remove_tree(folder)
            raise
        group.close()

        def clean_up() -> None:
            end()
            group.remove()
            remove_tree(folder)  # if the supervisor could not

        return control, clean_up

    def _start(
        self, command: Sequence[str], group: Sequence[int] = (), **options: Any
    ) -> tuple[socket.socket, Callable[[], bool]]:
        """Start `supervisor.main`; return also what ends it and tells if it ended by itself."""
        if self._is_closed:
            raise SandboxError("The sandbox is closed.")
        config = {"group": list(group)}
        process, control = start_module(command, "supervisor", config, pass_fds=group, **options)
        return control, lambda: end_process(process)

    def close(self) -> None:
        """Start no more programs; running ones end with their callers."""
        self._is_closed = True


class ContainerLauncher(PlainLauncher):
    """The level ``container``: starts each program in a new container."""

    level: Level = "container"
    runtime: Sequence[str] = ()

    def __init__(self, image: str = DEFAULT_IMAGE) -> None:
        """Look for an engine that has the image; raise SandboxUnavailableError without one."""
        found = [path for name in ("docker", "podman") if (path := shutil.which(name))]
        inspect = ["image", "inspect", image]
        self._engine = next((path for path in found if _succeeds([path, *inspect])), "")
        self._image = image
        if not self._engine:
            raise SandboxUnavailableError(
                f"level={self.level!r} needs docker or podman "
                f"(here: {', '.join(found) or 'neither'}) with the image {image!r}. "
                f"Get it with `docker pull {image}`, or name another one with Python 3.11 or newer "
                "with image=. Or use level='strong', which needs nothing "
                "installed, or, for code you trust, level='limits'."
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
        command = [self._engine, "run", *self.runtime, *options, self._image, *python_command()[1:]]
        control, end = self._start(command)
        return control, lambda: end() or _succeeds([self._engine, "rm", "--force", name])


class GvisorLauncher(ContainerLauncher):
    """The level ``gvisor``: containers with gVisor's kernel between them and the host's."""

    level: Level = "gvisor"
    runtime = ("--runtime=runsc",)

    def __init__(self, image: str = DEFAULT_IMAGE) -> None:
        """Run an empty container; raise SandboxUnavailableError if the engine has no gVisor."""
        super().__init__(image)
        options = ["run", *self.runtime, "--rm", "--network=none", "--pull=never"]
        if not _succeeds([self._engine, *options, "--entrypoint=python3", image, "-c", ""]):
            raise SandboxUnavailableError(
                f"level='gvisor' needs the runtime `runsc` in {self._engine}. Install gVisor "
                "(https://gvisor.dev/docs/user_guide/install), then `sudo runsc install` and "
                "restart docker. Or use level='strong' or 'container'."
            )


def python_command() -> list[str]:
    """Return the command of the real interpreter, not of a virtual environment's link to it."""
    return [os.path.realpath(sys.executable), *PYTHON_FLAGS, "-c", BOOTSTRAP]


def start_module(
    command: Sequence[str], module: str, config: dict[str, Any], **options: Any
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a command that runs `BOOTSTRAP`, and with it ``main(config)`` of one of our modules.

    Return it with a connection to its standard input and output, unless `options` of
    `subprocess.Popen` say otherwise. Raises SandboxError if there is no such command.
    """
    folder, names = Path(__file__).parent, dict.fromkeys([*_MODULES, module])
    modules = [["agent_envs", ""], [_PACKAGE, ""]]
    modules += [[f"{_PACKAGE}.{n}", (folder / f"{n}.py").read_text("utf-8")] for n in names]
    text = json.dumps({"main": f"{_PACKAGE}.{module}", "config": config, "modules": modules})
    ours, theirs = socket.socketpair()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.DEVNULL, **options}
    with theirs:
        try:  # in a session of its own: an interrupt at the terminal is for the host alone
            process = subprocess.Popen(command, start_new_session=True, **streams)  # noqa: S603
        except OSError as error:
            ours.close()
            raise SandboxError(f"A process could not be started: {error}") from error
    with contextlib.suppress(OSError):  # it ended; the caller notices
        ours.sendall(f"{len(text):010d}{text}".encode())
    return process, ours


def end_process(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the end of a process, or kill it; return whether it ended by itself."""
    try:
        process.wait(_END_SECONDS)
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
            end_process(process)
            os.set_blocking(stderr.fileno(), False)  # a child of the zygote may keep it open
            reason = (stderr.read() or b"").decode(errors="replace").strip().rpartition("\n")[2]
            raise _unavailable(reason or "the sandbox's process did not start")
    ours.settimeout(None)
    return process, ours


def _unavailable(reason: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(UNAVAILABLE_TEXT.format(reason=reason))


LAUNCHERS: Final[Mapping[str, Callable[..., Any]]] = {
    "strong": StrongLauncher,
    "gvisor": GvisorLauncher,
    "container": ContainerLauncher,
    "limits": PlainLauncher,
}
