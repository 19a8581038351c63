"""Streams of a program and its supervisor, carried over the supervisor's standard input and output.

The same code runs at both ends, on the host and inside: standard library only. A frame is one byte
that names the stream, four bytes of length, and data; no data means the end.
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

CONTROL: Final = 0
"""The supervisor's stream. The others are the program's descriptors."""
_OUTPUTS: Final = (1, 2)
_HEAD: Final = struct.Struct(">BI")
_READ_BYTES: Final = 65_536
_SET_DUMPABLE: Final = 4
_FLUSH_SECONDS: Final = 5.0


def forward(streams: dict[int, int], link: int) -> None:
    """Send the data of local descriptors over the link until the control stream ends.

    Output is sent before anything else that is ready: a reply or a report must not arrive before
    the output that preceded it.

    Args:
        streams: Number of the stream -> a descriptor that can be read.
        link: The descriptor to write to.
    """
    numbers, poll = {descriptor: number for number, descriptor in streams.items()}, select.poll()
    for number, descriptor in streams.items():
        os.set_blocking(descriptor, number not in _OUTPUTS)
        poll.register(descriptor, select.POLLIN)
    while CONTROL in numbers.values():
        ready = {numbers[descriptor] for descriptor, _ in poll.poll()}
        outputs = [number for number in _OUTPUTS if number in numbers.values()]
        for number in [*outputs, *sorted(ready.difference(_OUTPUTS), reverse=True)]:
            descriptor = streams[number]
            while (data := _read(descriptor)) is not None:
                try:
                    _write(link, _HEAD.pack(number, len(data)) + data)
                except OSError:
                    return  # the other side is gone
                if not data:
                    poll.unregister(descriptor)
                    del numbers[descriptor]
                if not data or number not in _OUTPUTS:
                    break


def receive(streams: dict[int, int], link: int) -> None:
    """Write the data from the link to local descriptors until the link ends; then end them all."""
    with open(link, "rb", closefd=False) as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            number, length = _HEAD.unpack(head)
            data = file.read(length)
            with contextlib.suppress(OSError):  # no one reads it any more
                if data:
                    _write(streams[number], data)
                else:
                    _shut_down(streams[number], socket.SHUT_WR)
    for descriptor in streams.values():
        _shut_down(descriptor, socket.SHUT_RDWR)


def _read(descriptor: int) -> bytes | None:
    """Return data, nothing at the end, or None if there is none yet."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""  # a socket was reset


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _shut_down(descriptor: int, how: int) -> None:
    """End a socket; a pipe ends when it is closed."""
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            end.shutdown(how)


def main(config: dict[str, Any]) -> None:
    """Supervise one program, as the first process of a container or a plain one.

    Args:
        config: ``channels``: number of descriptors after standard error; ``packages`` to import
            from; ``scratch``: a directory to remove at the end.
    """
    from agent_envs.sandbox import (
        archive,
        supervisor,
    )  # Linux only; the other end may be another system

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the program, of the same user, cannot reach into us
    sys.path += config["packages"]
    pipes = [os.pipe() for _ in _OUTPUTS]
    pairs = [socket.socketpair() for _ in range(config["channels"])]
    control, ours = socket.socketpair()
    theirs = [*(write for _, write in pipes), *(end.detach() for end, _ in pairs)]
    sockets = {CONTROL: ours.detach()} | {n: s.detach() for n, (_, s) in enumerate(pairs, 3)}
    link_in, link_out = os.dup(0), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    readable = sockets | {n: read for n, (read, _) in zip(_OUTPUTS, pipes, strict=True)}
    forwarding = threading.Thread(target=forward, args=(readable, link_out), daemon=True)
    forwarding.start()
    threading.Thread(target=receive, args=(sockets, link_in), daemon=True).start()
    processes = supervisor.Namespace(3) if os.getpid() == 1 else supervisor.Descendants()
    request = supervisor.receive_request(control)
    supervisor.supervise(
        request, theirs, control, processes, lambda: prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    )
    forwarding.join(_FLUSH_SECONDS)
    if "scratch" in config:
        os.chdir("/")
        archive.remove_tree(config["scratch"])  # the host may be gone
