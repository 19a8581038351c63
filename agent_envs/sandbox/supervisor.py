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


class Processes:
    """All other processes of this namespace, if we are its first; else our descendants."""

    def __init__(self, own_processes: int) -> None:
        """Adopt orphans; in a namespace, `own_processes` of ours count against the limit."""
        self._is_first = os.getpid() == 1
        self.num_own = own_processes if self._is_first else 0
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def pids(self) -> Iterator[int]:
        """Yield the processes; descendants after their parents."""
        pids = [int(n) for n in os.listdir("/proc") if n.isdigit() and n != "1"]  # noqa: PTH208
        if self._is_first:
            yield from pids
            return
        children: dict[int, list[int]] = {}
        for pid in pids:
            if fields := usage.stat_fields(pid):
                children.setdefault(int(fields[1]), []).append(pid)
        pending = children.get(os.getpid(), [])
        while pending:
            pid = pending.pop()
            yield pid
            pending += children.get(pid, [])

    def signal(self, number: int) -> None:
        """Send a signal to every process; in a namespace at once: none escapes it by forking.

        Elsewhere they are stopped first, or they would fork faster than we kill.
        """
        stop = [signal.SIGSTOP] if number == signal.SIGKILL and not self._is_first else []
        for one in [*stop, number]:
            for pid in [-1] if self._is_first else list(self.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)


def receive_request(control: socket.socket) -> dict[str, Any]:
    """Read the request from the host, with the ``archive`` that follows it."""
    with control.makefile("rb", buffering=0) as file:
        request: dict[str, Any] = json.loads(_read(file, int.from_bytes(_read(file, 4), "big")))
        request["archive"] = _read(file, request["archive_bytes"])
    return request


def _read(file: Any, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = file.read(length - len(data))
        if not part:
            raise EOFError("the host is gone")
        data += part
    return bytes(data)


def send_frame(control: socket.socket, kind: bytes, data: bytes = b"") -> None:
    """Send one frame to the host.

    Kinds: ``s``: the program is about to start, so every later failure is the program's. ``o``: the
    output of one call of a session (JSON). ``f``: the folder it left. ``r``: the report (JSON), the
    last frame.
    """
    with contextlib.suppress(OSError):  # the host is gone
        control.sendall(kind + len(data).to_bytes(4, "big") + data)


def supervise(
    request: dict[str, Any], channels: list[int], control: socket.socket, own_processes: int,
    confine: Callable[[], None], report_start: Callable[[], object],
) -> None:  # fmt: skip
    """Run the program of a request in the current directory, and report on `control`.

    Args:
        request: See `execution.Execution`.
        channels: The program's descriptors after standard error.
        control: The connection to the host.
        own_processes: See `Processes`.
        confine: Called in the program's process, last of all: gives up rights for good.
        report_start: Sends the frame ``s``, for good: the program may end us at once.
    """
    packed, started = request.pop("archive"), time.time()
    date = (archive.unpack(packed) if packed else archive.FIRST_DATE) + 1
    del packed  # or the program would be forked with it
    processes = Processes(own_processes)
    limits = request["limits"]
    outputs = [Output(limits["output_chars"]) for _ in range(2)]
    stdin = os.open("/dev/null", os.O_RDONLY)
    descriptors = [stdin, *(output.write_end for output in outputs), *channels]
    report_start()
    main = os.fork()
    if main == 0:
        _become_program(request, descriptors, processes.num_own, confine)
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
        folder, report["left_out"] = archive.pack(date, started, limits["scratch_mb"] * _MB)
        send_frame(control, b"f", folder)
    send_frame(control, b"r", json.dumps(report | _take(outputs)).encode())
    control.close()


class Output:
    """One output stream of a program, up to a number of characters."""

    def __init__(self, max_chars: int) -> None:
        """Open a pipe."""
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._max_chars, self._text = max_chars, ""
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
        text, self._text = self._text[: self._max_chars], ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return text


def _take(outputs: list[Output]) -> dict[str, str]:
    return {"stdout": outputs[0].take(), "stderr": outputs[1].take()}


def _become_program(
    request: dict[str, Any], descriptors: list[int], num_own: int, confine: Callable[[], None]
) -> None:
    """Be the program; never return."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("1000")  # should the machine run out of memory, this goes first
        above = [os.dup2(d, 64 + i, inheritable=True) for i, d in enumerate(descriptors)]
        for i, descriptor in enumerate(above):
            os.dup2(descriptor, i, inheritable=i < 3)
        os.closerange(len(above), 65_536)
        _limit_resources(request, num_own)
        confine()
        code = program.run(request["mode"], request["source"])
    finally:
        os._exit(code)


def _limit_resources(request: dict[str, Any], num_own: int) -> None:
    limits = request["limits"]
    wanted = {
        resource.RLIMIT_AS: limits["memory_mb"] * _MB,
        resource.RLIMIT_FSIZE: limits["file_mb"] * _MB,
        resource.RLIMIT_NPROC: limits["processes"] + num_own,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: _PENDING_SIGNALS,  # the user has one quota for all
    }
    if request["mode"] != "session":  # its processor time is per call: only the watch can limit it
        wanted[resource.RLIMIT_CPU] = max(1, -int(-limits["cpu_seconds"] // 1))
    for which, value in wanted.items():
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
