"""Start one program, watch its resource usage, and end its whole process tree.

Runs inside, as the parent of the program: standard library only. At the levels ``strong`` and
``container`` it is the first process of the program's process namespace, which the program can
neither see nor signal; at the level ``limits`` it adopts orphans (as a "subreaper") and searches
for descendants.

It talks to the host over descriptors that the program does not have. In, each after four bytes of
length: the request (JSON), the folder to begin with, then messages for the program (an empty one is
the last). End of file: stop. Out: frames (`send_frame`).
"""

import codecs
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from agent_envs.sandbox import archive, program, usage

_READ_BYTES: Final = 65_536
_MB: Final = 1 << 20
_OPEN_FILES: Final = 128
_PENDING_SIGNALS: Final = 128
_SET_DUMPABLE: Final = 4
_SET_CHILD_SUBREAPER: Final = 36
_MAX_MESSAGE_BYTES: Final = 16 * _MB
_PIDFD_GETFD: Final = 438  # the same number on every processor
_RECEIVE_CALL, _ANSWER_CALL, _CALL_BYTES = 0xC0502100, 0xC0182101, 80
_ORDINARY_CALLS: Final = ((41, socket.AF_UNIX), (198, socket.AF_UNIX))  # socket, by processor
MAX_DENIED_CALLS: Final = 1000
"""Denied calls that are answered; later ones fail with ENOSYS, and cost the supervisor nothing."""


class Processes:
    """All other processes of this namespace, if we are its first; else our descendants."""

    def __init__(self) -> None:
        """Adopt orphans; in a namespace, our own process counts against the limit."""
        self._is_first = os.getpid() == 1
        self.num_own = int(self._is_first)
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


class Channel:
    """The messages between the host and a program: lines, one from each side in turn.

    In a session they begin and end the calls. What is kept for a program that does not read, or
    whose turn it is not, is bounded.
    """

    def __init__(
        self, mode: str, target: int, processes: Processes, outputs: list["Output"],
        watch: usage.Watch,
    ) -> None:  # fmt: skip
        """Connect a program; its messages go to the host at `target`."""
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.program_end, self._target = theirs.detach(), target
        self._processes, self._outputs, self._watch = processes, outputs, watch
        self._is_its_turn = mode == "check"
        self.is_idle = self._is_session = mode == "session"
        """Whether the program stands still: between the calls of a session."""
        self._outgoing, self._incoming = b"", bytearray()

    def fileno(self) -> int:
        """Return the descriptor of our end."""
        return self._ours.fileno()

    def register(self, poll: "select.poll") -> None:
        """Wait for the program, unless it has to wait."""
        poll.register(self, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if not self._is_its_turn:
            poll.unregister(self)

    def put(self, message: bytes) -> None:
        """Begin to send a message; after an empty one the program reads the end."""
        self._outgoing, self._is_its_turn = message, True
        if not message:
            self._ours.shutdown(socket.SHUT_WR)
        if self._is_session:
            self.is_idle = False
            self._processes.signal(signal.SIGCONT)
            self._watch.begin()

    def advance(self) -> str:
        """Send and receive what is possible; return the limit that is exceeded, or nothing.

        Of what the program sends in its turn the first line counts; an empty message is the end.
        """
        try:
            if self._outgoing:
                self._outgoing = self._outgoing[self._ours.send(self._outgoing) :]
            data = self._ours.recv(_READ_BYTES)
        except BlockingIOError:
            return ""
        except OSError:  # the program closed it
            data = b""
        self._incoming += data
        if data and b"\n" not in data and len(self._incoming) < _MAX_MESSAGE_BYTES:
            return ""
        line, mark, _ = self._incoming.partition(b"\n")
        if not mark and not self._is_session:  # too long: a sender that still writes gets an error
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)
        self._outgoing, self._incoming, self._is_its_turn = b"", bytearray(), False
        message = bytes(line + mark) if mark else b""
        if self._is_session:
            return self._end_call(message)
        send_frame(self._target, b"m", message)
        return ""

    def _end_call(self, reply: bytes) -> str:
        self.is_idle = True
        self._processes.signal(signal.SIGSTOP)
        for output in self._outputs:
            output.read()
        if not any(output.is_over for output in self._outputs):
            texts = _take(self._outputs)
            message = {"reply": reply.decode(errors="replace"), **texts, **self._watch.usage()}
            send_frame(self._target, b"m", json.dumps(message).encode())
        return "memory_limit" if self._watch.holds_too_much() else ""


def main(config: dict[str, Any]) -> None:
    """Supervise one program in the current directory, and remove it at the end."""
    scratch = os.getcwd()  # noqa: PTH109
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the program, of the same user, cannot reach into us

    def confine() -> int:
        prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        return -1

    supervise(receive_request(0), 0, 1, confine, config["group"])
    os.chdir("/")
    archive.remove_tree(scratch)  # the host may be gone


def receive_request(source: int) -> dict[str, Any]:
    """Read the request from the host, with the ``archive`` that follows it."""
    request: dict[str, Any] = json.loads(_receive(source) or b"")
    return request | {"archive": _receive(source)}


def _receive(source: int) -> bytes | None:
    """Read a message of the host; None if there is no other."""
    size = _read(source, 4)
    return None if len(size) < 4 else _read(source, int.from_bytes(size, "big"))


def _read(source: int, length: int) -> bytes:
    data = bytearray()
    with contextlib.suppress(OSError):  # the host is gone
        while part := os.read(source, length - len(data)):
            data += part
    return bytes(data)


def send_frame(target: int, kind: bytes, data: bytes = b"") -> None:
    """Send one frame to the host.

    Kinds: ``s``: the program is about to start, so every later failure is the program's. ``m``: a
    message of its channel; of a session, with the output of the call (JSON). ``f``: the folder it
    left. ``r``: the report (JSON), the last frame.
    """
    left = memoryview(kind + len(data).to_bytes(4, "big") + data)
    with contextlib.suppress(OSError):  # the host is gone
        while left:
            left = left[os.write(target, left) :]


def supervise(
    request: dict[str, Any], source: int, target: int, confine: Callable[[], int],
    group: Sequence[int],
) -> None:  # fmt: skip
    """Run the program of a request in the current directory, and report it.

    Args:
        request: See `execution.Execution`.
        source: The descriptor on which the host sends messages.
        target: The descriptor for frames to the host.
        confine: Called in the program's process, last of all: gives up rights for good. It
            returns the descriptor at which denied calls are announced, or -1.
        group: Descriptors of a control group (see `ControlGroup`), or none.
    """
    packed, started = request.pop("archive"), time.time()
    date = (archive.unpack(packed) if packed else archive.FIRST_DATE) + 1
    del packed  # or the program would be forked with it
    processes = Processes()
    limits, mode = request["limits"], request["mode"]
    outputs = [Output(limits["output_chars"]) for _ in range(2)]
    enter_group, cpu_stat = group or (None, None)
    watch = usage.Watch(processes.pids, limits, cpu_stat)
    channel = Channel(mode, target, processes, outputs, watch)
    descriptors = [
        os.open("/dev/null", os.O_RDONLY), *(each.write_end for each in outputs),
        channel.program_end,
    ]  # fmt: skip
    if mode in ("python", "shell"):
        os.close(descriptors.pop())
    handover, theirs = socket.socketpair()
    descriptors.append(theirs.detach())
    send_frame(target, b"s")
    main = os.fork()
    if main == 0:
        if enter_group is not None:
            with contextlib.suppress(OSError):
                os.write(enter_group, b"0")
        _become_program(request, descriptors, processes.num_own, confine)
    for descriptor in descriptors:
        os.close(descriptor)
    ending = _watch(main, source, channel, outputs, watch, _take_listener(main, handover))
    report: dict[str, Any] = {"ended_by": ending, "exit_code": _end(main, processes)}
    report |= watch.usage()
    if report["exit_code"] == -signal.SIGXCPU:
        report["ended_by"] = "cpu_limit"
    for output in outputs:
        output.read()
        if output.is_over:
            report["ended_by"] = "output_limit"
    if request["collect_files"]:
        folder, report["left_out"] = archive.pack(date, started, limits["scratch_mb"] * _MB)
        send_frame(target, b"f", folder)
    send_frame(target, b"r", json.dumps(report | _take(outputs)).encode())


class Output:
    """One output stream of a program, up to a number of characters."""

    def __init__(self, max_chars: int) -> None:
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
    request: dict[str, Any], descriptors: list[int], num_own: int, confine: Callable[[], int]
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
        _hand_over(confine(), len(above) - 1)
        code = program.run(request["mode"], request["source"])
    finally:
        os._exit(code)


def _hand_over(listener: int, descriptor: int) -> None:
    """Let the supervisor copy the listener for denied calls; close it, who could answer them."""
    os.write(descriptor, struct.pack("i", listener))
    os.read(descriptor, 1)
    for each in (descriptor, listener):
        if each >= 0:
            os.close(each)


def _take_listener(main: int, handover: socket.socket) -> list[int]:
    """Return our copy of the program's listener, if it has one."""
    with handover, contextlib.suppress(OSError, struct.error):
        (number,) = struct.unpack("i", handover.recv(4))
        pidfd = os.pidfd_open(main)
        listener = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, number, 0) if number >= 0 else -1
        os.close(pidfd)
        handover.send(b"r")
        return [int(listener)] if listener >= 0 else []
    return []


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
    main: int, source: int, channel: Channel, outputs: list[Output], watch: usage.Watch,
    listeners: list[int],
) -> str:  # fmt: skip
    """Wait until the main process ends, the host stops it, or a limit is reached; return which."""
    by_descriptor = {output.read_end: output for output in outputs}
    poll = select.poll()
    with contextlib.suppress(OSError):  # gVisor has none; the samples notice the end
        poll.register(os.pidfd_open(main), select.POLLIN)
    for descriptor in (source, *by_descriptor, *listeners):
        poll.register(descriptor, select.POLLIN)
    watch.denied_calls = 0 if listeners else None
    while True:
        channel.register(poll)
        # Between the calls of a session nothing runs, and nothing has to be watched.
        pause = None if channel.is_idle else 1000 * watch.seconds_to_sample
        ready = {n for n, _ in poll.poll(pause)}
        for descriptor in ready.intersection((*by_descriptor, *listeners)):
            output = by_descriptor.get(descriptor)
            if not (output.read() if output else _deny_call(descriptor, watch)):
                poll.unregister(descriptor)
        if os.waitid(os.P_PID, main, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return "exit"
        _reap_orphans(main)
        if source in ready:
            message = _receive(source)
            if message is None:
                return "stopped"
            channel.put(message)
        ending = channel.advance() if ready.intersection((source, channel.fileno())) else ""
        if not ending and not channel.is_idle:
            ending = watch.exceeded()
        if ending or any(output.is_over for output in outputs):
            return ending or "output_limit"


def _deny_call(listener: int, watch: usage.Watch) -> bool:
    """Answer a denied call, and count it; return whether to wait for more."""
    call = bytearray(_CALL_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE_CALL, call)
        number, _, _, argument = struct.unpack_from("iIQQ", call, 16)
        # Ordinary programs look for local sockets of the system's services.
        if (number, argument) not in _ORDINARY_CALLS:
            watch.denied_calls = (watch.denied_calls or 0) + 1
        watch.num_answered += 1
        answer = struct.pack("Qqii", *struct.unpack_from("Q", call), 0, -errno.EPERM, 0)
        fcntl.ioctl(listener, _ANSWER_CALL, answer)
    except OSError as error:
        if error.errno == errno.ENOENT and not _has_hung_up(listener):
            return True  # the process of that call has ended
    else:
        if watch.num_answered < MAX_DENIED_CALLS:
            return True
    os.close(listener)
    return False


def _has_hung_up(descriptor: int) -> bool:
    """Return whether no process is left at the other end."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


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
