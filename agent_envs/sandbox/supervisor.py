"""Starts one program, watches what it takes, and ends its whole process tree.

Runs inside, as the parent of the program: standard library only. At the levels ``strong`` and
``container`` it is the first process of its own process namespace, which the program can neither
see nor signal; at the level ``limits`` it adopts orphans (a "subreaper") and hunts descendants.

It talks to the host over a socket that the program does not have. In: the request (four bytes of
length, JSON), the folder to begin with, then one byte at a time: ``c`` a call of a session begins,
``d`` it is done. End of file: stop. Out: frames (`send_frame`).
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from agent_envs.sandbox import program, tree, usage

_POLL_SECONDS: Final = 0.02
_COUNT_SECONDS: Final = 0.1
"""How often memory is counted exactly; what is resident is looked at each time."""
_MB: Final = 1 << 20
_OPEN_FILES: Final = 128
_PENDING_SIGNALS: Final = 128
_SET_CHILD_SUBREAPER: Final = 36


class Namespace:
    """All other processes of this process namespace, whose first process we are."""

    own_processes = 1
    """Processes of ours that count against the program's limit."""

    def __init__(self) -> None:
        """Refuse to exist elsewhere: there, a signal to all would hit the user's processes."""
        if os.getpid() != 1:
            raise RuntimeError("not the first process of a namespace")

    def pids(self) -> Iterator[int]:
        """Yield the processes."""
        for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs more than the fork
            if name.isdigit() and name != "1":
                yield int(name)

    def signal(self, number: int) -> None:
        """Send a signal to every process at once; none can fork its way out."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)


class Descendants:
    """The processes below this one, for want of a namespace."""

    own_processes = 0

    def __init__(self) -> None:
        """Adopt orphans from now on."""
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def pids(self) -> Iterator[int]:
        """Yield the processes, parents first."""
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit() and (fields := usage.stat_fields(int(name))):
                children.setdefault(int(fields[1]), []).append(int(name))
        pending = children.get(os.getpid(), [])
        while pending:
            pid = pending.pop()
            yield pid
            pending += children.get(pid, [])

    def signal(self, number: int) -> None:
        """Send a signal to every process; stop them first, or they fork faster than we kill."""
        for one in (signal.SIGSTOP, number) if number == signal.SIGKILL else (number,):
            for pid in list(self.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)


Processes = Namespace | Descendants


def receive_request(control: socket.socket) -> dict[str, Any]:
    """Read the request from the host; its ``folder`` comes after it."""
    length = int.from_bytes(_read(control, 4), "big")
    request: dict[str, Any] = json.loads(_read(control, length))
    request["folder"] = _read(control, request["folder_bytes"])
    return request


def send_frame(control: socket.socket, kind: bytes, data: bytes = b"") -> None:
    """Tell the host something.

    Args:
        control: The way to it.
        kind: ``s``: the program is about to start, and what goes wrong from here on is its doing.
            ``f``: a part of the folder it left. ``r``: the report, in JSON; the last frame.
        data: What the frame holds.
    """
    with contextlib.suppress(OSError):  # the host is gone, and no one is left to be told
        control.sendall(kind + len(data).to_bytes(4, "big") + data)


def supervise(
    request: dict[str, Any],
    descriptors: list[int],
    control: socket.socket,
    processes: Processes,
    confine: Callable[[], None],
) -> None:
    """Run the program that `request` describes in the current directory; report on `control`.

    Args:
        request: ``mode``, ``source``, ``folder``, ``collect_files`` and ``limits``.
        descriptors: Its standard input, output and error, and what else it inherits.
        control: The way to the host.
        processes: Those that end with it.
        confine: Called in the program's process, last of all: gives up rights for good.
    """
    folder, started = request.pop("folder"), time.time()
    if folder:
        tree.unpack(folder)
    date = tree.date_of(folder) + 1
    del folder  # or the program would be forked with it
    send_frame(control, b"s")
    main = os.fork()
    if main == 0:
        _become_program(request, descriptors, processes, confine)
    for descriptor in descriptors:
        os.close(descriptor)
    is_session = request["mode"] == "session"
    ending = _watch(main, control, processes, request["limits"], is_session=is_session)
    report: dict[str, Any] = {"ended_by": ending, "exit_code": _end(main, processes)}
    if report["exit_code"] == -signal.SIGXCPU:
        report["ended_by"] = "cpu_limit"
    if request["collect_files"]:
        max_bytes = request["limits"]["scratch_mb"] * _MB
        packer = tree.Packer(date=date, started=started, max_bytes=max_bytes)
        for part in packer.pack():
            send_frame(control, b"f", part)
        report["left_out"] = packer.left_out
    send_frame(control, b"r", json.dumps(report).encode())
    control.close()


def _become_program(
    request: dict[str, Any],
    descriptors: list[int],
    processes: Processes,
    confine: Callable[[], None],
) -> None:
    """Be the program; never return."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("1000")  # should the machine run out of memory, this goes first
        _place_descriptors(descriptors)
        _limit_resources(request["limits"], processes, is_session=request["mode"] == "session")
        confine()
        code = program.run(request["mode"], request["source"])
    finally:
        os._exit(code)


def _place_descriptors(descriptors: list[int]) -> None:
    """Make them 0, 1, 2, 3, ...; close all others."""
    above = [os.dup2(d, 64 + i, inheritable=True) for i, d in enumerate(descriptors)]
    for i, descriptor in enumerate(above):
        os.dup2(descriptor, i, inheritable=i < 3)
    os.closerange(len(above), 65_536)


def _limit_resources(limits: dict[str, Any], processes: Processes, *, is_session: bool) -> None:
    memory, size = limits["memory_mb"] * _MB, limits["file_mb"] * _MB
    processes = limits["processes"] + processes.own_processes
    wanted = [
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS),  # the user has one quota for all
    ]
    if not is_session:  # whose processor time is per call, so only the watch can tell
        wanted.append((resource.RLIMIT_CPU, max(1, -int(-limits["cpu_seconds"] // 1))))
    for which, value in wanted:
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # SIGXCPU comes at the soft limit, SIGKILL at the hard one
        spare = 1 if which == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else 0
        resource.setrlimit(which, (value, value + spare))


def _watch(
    main: int,
    control: socket.socket,
    processes: Processes,
    limits: dict[str, Any],
    *,
    is_session: bool,
) -> str:
    """Wait until the main process ends, the host says stop, or a limit is reached."""
    watch = _Watch(processes, limits)
    is_idle = is_session
    poll = select.poll()
    pidfd = os.pidfd_open(main)
    poll.register(pidfd, select.POLLIN)
    poll.register(control, select.POLLIN)
    try:
        while True:
            # Between the calls of a session nothing runs, and nothing has to be watched.
            ready = [number for number, _ in poll.poll(None if is_idle else _POLL_SECONDS * 1000)]
            if pidfd in ready:
                return "exit"
            _reap_orphans(main)
            if control.fileno() in ready:
                order = control.recv(1)
                if not order:
                    return "stopped"
                is_idle = order == b"d"
                processes.signal(signal.SIGSTOP if is_idle else signal.SIGCONT)
                watch.begin()
            if not is_idle and (ending := watch.exceeded()):
                return ending
            if is_idle and watch.holds_too_much():
                return "memory_limit"
    finally:
        os.close(pidfd)


class _Watch:
    """Compares what the program takes with what it may."""

    def __init__(self, processes: Processes, limits: dict[str, Any]) -> None:
        self._processes, self._limits = processes, limits
        self._max_bytes: int = limits["memory_mb"] * _MB
        self._next_count = 0.0
        self._start(0.0)

    def begin(self) -> None:
        """Start the clock of a call."""
        self._start(usage.take_sample(self._processes.pids()).cpu_seconds)

    def _start(self, cpu_seconds: float) -> None:
        self._started = self._last_look = time.monotonic()
        self._cpu_before = self._last_cpu = cpu_seconds
        self._waited = 0.0  # for a processor

    def exceeded(self) -> str:
        """Return which limit is exceeded; empty if none is."""
        now, sample = time.monotonic(), usage.take_sample(self._processes.pids())
        if sample.is_runnable:
            self._waited += now - self._last_look - (sample.cpu_seconds - self._last_cpu)
        self._last_look, self._last_cpu = now, sample.cpu_seconds
        longest = self._limits["wall_seconds"] + max(0.0, self._waited)
        if now - self._started > min(longest, self._limits["longest_seconds"]):
            return "timeout"
        if sample.cpu_seconds - self._cpu_before > self._limits["cpu_seconds"]:
            return "cpu_limit"
        if sample.num_threads > self._limits["processes"]:
            return "process_limit"  # root is exempt from the kernel's own limit
        if sample.resident_bytes > self._max_bytes or now > self._next_count:
            self._next_count = now + _COUNT_SECONDS
            return "memory_limit" if self.holds_too_much() else ""
        return ""

    def holds_too_much(self) -> bool:
        """Return whether it holds more memory than it may."""
        return usage.count_memory(self._processes.pids()) > self._max_bytes


def _reap_orphans(main: int) -> None:
    """Reap what others left behind, or it would count as running."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (child := os.waitid(os.P_ALL, 0, options)) is not None and child.si_pid != main:
        os.waitpid(child.si_pid, 0)


def _end(main: int, processes: Processes) -> int | None:
    """Kill and reap every process; return the exit code of the main one."""
    exit_code = None
    while True:
        processes.signal(signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return exit_code
        if pid == main:
            exit_code = os.waitstatus_to_exitcode(status)


def _read(control: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = control.recv(min(length - len(data), _MB))
        if not part:
            raise EOFError("the host is gone")
        data += part
    return bytes(data)


def main(config: dict[str, Any]) -> None:
    """Supervise one program as plain processes, at the level ``limits``.

    Args:
        config: ``control`` and ``descriptors``, inherited; ``packages`` to import from;
            ``scratch``, the directory to remove at the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=config["control"])
    sys.path += config["packages"]
    supervise(
        receive_request(control), config["descriptors"], control, Descendants(), _confine_nothing
    )
    os.chdir("/")
    with contextlib.suppress(OSError):
        tree.remove(config["scratch"])  # the host may be gone


def _confine_nothing() -> None:
    """Keep all rights but what the limits take."""
