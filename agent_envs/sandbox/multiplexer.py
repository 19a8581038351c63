"""Several streams over one: how a program in a container talks through its standard streams.

The same code runs at both ends, on the host and in the container: standard library only. A frame
is one byte that names the stream, four bytes of length, and the data; no data means the end.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
from typing import Any, Final

CONTROL: Final = 255
"""The stream of the supervisor; the others are the program's descriptors, from 0."""

_OUTPUTS: Final = (1, 2)
_HEADER: Final = struct.Struct(">BI")
_READ_BYTES: Final = 65_536
_SET_DUMPABLE: Final = 4
_FLUSH_SECONDS: Final = 5.0


class Multiplexer:
    """Passes data between local descriptors and the link, both ways, until the link ends."""

    def __init__(
        self, link_in: int, link_out: int, streams: dict[int, int], *, ends_with_control: bool
    ) -> None:
        """Own and serve these descriptors.

        Args:
            link_in: Frames from the other side.
            link_out: Frames to the other side.
            streams: Number of the stream -> local descriptor: a socket, or one end of a pipe.
            ends_with_control: Whether all is said once the control stream ends here.
        """
        self._link_in, self._link_out, self._streams = link_in, link_out, streams
        self._ends_with_control = ends_with_control
        self._received = bytearray()
        self._waiting = {number: bytearray() for number in streams}
        self._is_read = {number: _is_readable(fd) for number, fd in streams.items()}
        self._is_ending: set[int] = set()
        self._poll = select.poll()

    def run(self) -> None:
        """Serve until the link ends; then close everything."""
        numbers = {descriptor: number for number, descriptor in self._streams.items()}
        self._poll.register(self._link_in, select.POLLIN)
        for descriptor, number in numbers.items():
            os.set_blocking(descriptor, False)
            self._watch(number)
        try:
            while self._is_read.get(CONTROL) or not self._ends_with_control:
                for descriptor, _ in self._poll.poll():
                    if descriptor != self._link_in:
                        self._serve_stream(numbers[descriptor])
                    elif not self._read_link():
                        self._deliver()
                        return
        except OSError:
            return  # the other side is gone
        finally:
            for descriptor in (self._link_in, self._link_out, *self._streams.values()):
                os.close(descriptor)

    def _deliver(self) -> None:
        """Write all that has come, however slowly it is read; the supervisor's report at last."""
        for number in sorted(self._streams):
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.set_blocking(self._streams[number], True)
                while waiting := self._waiting[number]:
                    del waiting[: os.write(self._streams[number], waiting[:_READ_BYTES])]

    def _serve_stream(self, number: int) -> None:
        """Write what waits for it, and read what it holds."""
        self._flush(number)
        data = self._read_stream(number)
        if data is not None and number == CONTROL and self._ends_with_control:
            # The program is over. What it wrote may still be on its way here, and goes first.
            for other in self._streams:
                while (
                    other != CONTROL and self._is_read[other] and (rest := self._read_stream(other))
                ):
                    self._send(other, rest)
        if data is not None:
            self._send(number, data)
        if data == b"":
            self._is_read[number] = False
            self._watch(number)

    def _read_stream(self, number: int) -> bytes | None:
        """Return what the stream holds; empty at its end, None if there is nothing now."""
        if not self._is_read[number]:
            return None
        try:
            return os.read(self._streams[number], _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # a socket was reset

    def _send(self, number: int, data: bytes) -> None:
        view = memoryview(_HEADER.pack(number, len(data)) + data)
        while view:
            view = view[os.write(self._link_out, view) :]

    def _read_link(self) -> bool:
        data = os.read(self._link_in, _READ_BYTES)
        self._received += data
        while len(self._received) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._received)
            if len(self._received) < _HEADER.size + length:
                break
            frame = self._received[_HEADER.size : _HEADER.size + length]
            del self._received[: _HEADER.size + length]
            if number in self._streams:
                self._waiting[number] += frame
                if not frame:
                    self._is_ending.add(number)
                self._flush(number)
        return bool(data)

    def _flush(self, number: int) -> None:
        """Write as much as fits; the rest when more does."""
        descriptor, waiting = self._streams[number], self._waiting[number]
        if number == CONTROL and not self._ends_with_control and self._has_output:
            return  # the supervisor's report comes after all that the program wrote
        try:
            while waiting:
                del waiting[: os.write(descriptor, waiting[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            waiting.clear()  # nobody reads it any more
        if not waiting and number in self._is_ending:
            self._is_ending.discard(number)
            _end(descriptor)
        self._watch(number)
        if number in _OUTPUTS and not waiting and CONTROL in self._streams:
            self._flush(CONTROL)

    @property
    def _has_output(self) -> bool:
        return any(self._waiting.get(number) for number in _OUTPUTS)

    def _watch(self, number: int) -> None:
        """Poll the stream for what is still to be done with it."""
        events = select.POLLIN if self._is_read[number] else 0
        events |= select.POLLOUT if self._waiting[number] else 0
        if events:
            self._poll.register(self._streams[number], events)
        elif not self._is_read[number]:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._streams[number])


class _Link:
    """Descriptors in pairs: one for the program or its supervisor, one for the multiplexer."""

    def __init__(self, count: int) -> None:
        """Make pipes for the program's standard streams, sockets for what else it has."""
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        sockets = [socket.socketpair() for _ in range(count - 3)]
        self.theirs = [inputs[0], outputs[1], errors[1]]
        self.theirs += [theirs.detach() for theirs, _ in sockets]
        ours = [inputs[1], outputs[0], errors[0], *(ours.detach() for _, ours in sockets)]
        self.streams = dict(enumerate(ours))
        self.control, control = socket.socketpair()
        self.streams[CONTROL] = control.detach()


def main(config: dict[str, Any]) -> None:
    """Be the first process of a container: supervise one program, multiplex its streams.

    Args:
        config: ``descriptors``: how many the program has; ``packages`` to import from.
    """
    from agent_envs.sandbox import supervisor  # Linux only; the other end may be another system

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the program, of the same user, cannot reach into us
    sys.path += config["packages"]
    link = _Link(config["descriptors"])
    link_in, link_out = os.dup(0), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    multiplexer = Multiplexer(link_in, link_out, link.streams, ends_with_control=True)
    thread = threading.Thread(target=multiplexer.run, daemon=True)
    thread.start()
    is_first = os.getpid() == 1
    tree = supervisor.Namespace() if is_first else supervisor.Descendants()
    request = supervisor.receive_request(link.control)
    supervisor.supervise(
        request, link.theirs, link.control, tree, lambda: prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    )
    thread.join(_FLUSH_SECONDS)  # until all is said


def _is_readable(descriptor: int) -> bool:
    """Return whether anything can come from it: the writing end of a pipe has nothing to say."""
    import fcntl  # not on Windows, which has no containers of this kind

    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY


def _end(descriptor: int) -> None:
    """Say that no more comes."""
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        with socket.socket(fileno=os.dup(descriptor)) as end, contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)
    else:  # a pipe: letting go of it is the end
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, descriptor)
        os.close(quiet)
