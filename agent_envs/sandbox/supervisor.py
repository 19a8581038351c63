"""Start one program, watch its resource usage, and end its whole process tree.

Runs inside, as the parent of the program: standard library only. At the levels ``strong`` and
``container`` it is the first process of the program's process namespace, which the program can
neither see nor signal; at the level ``limits`` it adopts orphans (as a "subreaper") and searches
for descendants.

It talks to the host over a socket that the program does not have. In: the request (four bytes of
length, JSON), the folder to begin with, then single bytes: ``c`` a call of a session begins, ``d``
it is done. End of file: stop. Out: frames (`send_frame`).
"""

import codecs
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from agent_envs.sandbox import archive, program, usage

_POLL_SECONDS: Final = 0.02
_READ_BYTES: Final = 65_536
_MB: Final = 1 << 20
_OPEN_FILES: Final = 128
_PENDING_SIGNALS: Final = 128
_SET_CHILD_SUBREAPER: Final = 36


class Namespace:
    """All other processes of this process namespace, whose first process we are."""

    def __init__(self, own_processes: int = 1) -> None:
        """Fail elsewhere: there, a signal to all would reach the user's processes.

        Args:
            own_processes: Our processes and threads, which count against the program's limit.
        """
        if os.getpid() != 1:
            raise RuntimeError("not the first process of a namespace")
        self.own_processes = own_processes

    def pids(self) -> Iterator[int]:
        """Yield the processes."""
        for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs more than the fork
            if name.isdigit() and name != "1":
                yield int(name)

    def signal(self, number: int) -> None:
        """Send a signal to every process at once; none can escape it by forking."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)


class Descendants:
    """The processes below this one, where there is no namespace."""

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
    """Read the request from the host, with the ``archive`` that follows it."""
    length = int.from_bytes(_read(control, 4), "big")
    request: dict[str, Any] = json.loads(_read(control, length))
    request["archive"] = _read(control, request["archive_bytes"])
    return request


def _read(control: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = control.recv(min(length - len(data), _MB))
        if not part:
            raise EOFError("the host is gone")
        data += part
    return bytes(data)


def send_frame(control: socket.socket, kind: bytes, data: bytes = b"") -> None:
    """Send one frame to the host.

    Args:
        control: The connection to it.
        kind: ``s``: the program is about to start, so every later failure is the program's.
            ``o``: the output of one call of a session. ``f``: a part of the folder it left.
            ``r``: the report, the last frame.
        data: Content of the frame; JSON, but for ``f``.
    """
    with contextlib.suppress(OSError):  # the host is gone
        control.sendall(kind + len(data).to_bytes(4, "big") + data)


def supervise(
    request: dict[str, Any], channels: list[int], control: socket.socket, processes: Processes,
    confine: Callable[[], None],
) -> None:  # fmt: skip
    """Run a program in the current directory, and report on `control`.

    Args:
        request: See `execution.make_request`; also ``limits``.
        channels: Its descriptors after standard error.
        control: The connection to the host.
        processes: The processes that end with it.
        confine: Called in the program's process, last of all: gives up rights for good.
    """
    packed, started = request.pop("archive"), time.time()
    date = (archive.unpack(packed) if packed else archive.FIRST_DATE) + 1
    del packed  # or the program would be forked with it
    stdin = _make_stdin(request.pop("stdin").encode(errors="replace"))
    outputs = [Output(request["limits"]["output_chars"]) for _ in range(2)]
    descriptors = [stdin, *(output.write_end for output in outputs), *channels]
    send_frame(control, b"s")
    main = os.fork()
    if main == 0:
        _become_program(request, descriptors, processes, confine)
    for descriptor in descriptors:
        os.close(descriptor)
    ending = _watch(main, control, processes, request, outputs)
    report: dict[str, Any] = {"ended_by": ending, "exit_code": _end(main, processes)}
    if report["exit_code"] == -signal.SIGXCPU:
        report["ended_by"] = "cpu_limit"
    for output in outputs:
        output.read()
        if output.is_over:
            report["ended_by"] = "output_limit"
    if request["collect_files"]:
        packer = archive.Packer(lambda part: send_frame(control, b"f", part), date, started)
        packer.pack(request["limits"]["scratch_mb"] * _MB)
        report["left_out"] = packer.left_out
    send_frame(control, b"r", json.dumps(report | _take(outputs)).encode())
    control.close()


class Output:
    """One output stream of a program, up to a number of characters."""

    def __init__(self, max_chars: int) -> None:
        """Open a pipe."""
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._max_chars = max_chars
        self.take()

    def read(self) -> bool:
        """Read what was written, as far as it fits; return whether more may come."""
        while not self.is_over:
            try:
                data = os.read(self.read_end, _READ_BYTES)
            except BlockingIOError:
                break
            self._text += self._decoder.decode(data, final=not data)
            if not data:
                return False
        return True

    @property
    def is_over(self) -> bool:
        """Whether more was written than fits."""
        return len(self._text) > self._max_chars

    def take(self) -> str:
        """Return the text so far, and start again."""
        text = getattr(self, "_text", "")[: self._max_chars]
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return text


def _take(outputs: list[Output]) -> dict[str, str]:
    return {"stdout": outputs[0].take(), "stderr": outputs[1].take()}


def _make_stdin(data: bytes) -> int:
    """Return a file in memory that the program can read but not change."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _become_program(
    request: dict[str, Any], descriptors: list[int], processes: Processes,
    confine: Callable[[], None],
) -> None:  # fmt: skip
    """Be the program; never return."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("1000")  # should the machine run out of memory, this goes first
        _place_descriptors(descriptors)
        _limit_resources(request, processes)
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


def _limit_resources(request: dict[str, Any], processes: Processes) -> None:
    limits = request["limits"]
    wanted = [
        (resource.RLIMIT_AS, limits["memory_mb"] * _MB),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * _MB),
        (resource.RLIMIT_NPROC, limits["processes"] + processes.own_processes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS),  # the user has one quota for all
    ]
    if request["mode"] != "session":  # its processor time is per call: only the watch can limit it
        wanted.append((resource.RLIMIT_CPU, max(1, -int(-limits["cpu_seconds"] // 1))))
    for which, value in wanted:
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # SIGXCPU comes at the soft limit, SIGKILL at the hard one
        spare = 1 if which == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else 0
        resource.setrlimit(which, (value, value + spare))


def _watch(
    main: int, control: socket.socket, processes: Processes, request: dict[str, Any],
    outputs: list[Output],
) -> str:  # fmt: skip
    """Wait until the main process ends, the host stops it, or a limit is reached; return which."""
    watch = usage.Watch(processes.pids, request["limits"])
    is_idle = request["mode"] == "session"
    by_descriptor = {output.read_end: output for output in outputs}
    poll, pidfd = select.poll(), os.pidfd_open(main)
    for descriptor in (pidfd, control.fileno(), *by_descriptor):
        poll.register(descriptor, select.POLLIN)
    try:
        while True:
            # Between the calls of a session nothing runs, and nothing has to be watched.
            ready = {number for number, _ in poll.poll(None if is_idle else _POLL_SECONDS * 1000)}
            for descriptor in ready.intersection(by_descriptor):
                if not by_descriptor[descriptor].read():
                    poll.unregister(descriptor)
            if pidfd in ready:
                return "exit"
            _reap_orphans(main)
            if control.fileno() in ready:
                order = control.recv(1)
                if not order:
                    return "stopped"
                is_idle = order == b"d"
                processes.signal(signal.SIGSTOP if is_idle else signal.SIGCONT)
                ending = _end_call(control, watch, outputs) if is_idle else watch.begin()
            else:
                ending = "" if is_idle else watch.exceeded()
            if ending or any(output.is_over for output in outputs):
                return ending or "output_limit"
    finally:
        os.close(pidfd)


def _end_call(control: socket.socket, watch: usage.Watch, outputs: list[Output]) -> str:
    """Send the output of a call; return the limit that is exceeded, or an empty string."""
    for output in outputs:
        output.read()
    if not any(output.is_over for output in outputs):
        send_frame(control, b"o", json.dumps(_take(outputs)).encode())
    return "memory_limit" if watch.holds_too_much() else ""


def _reap_orphans(main: int) -> None:
    """Reap processes whose parents ended, or they would count as running."""
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
