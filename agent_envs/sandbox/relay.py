"""Sockets of a program and its supervisor, carried over the supervisor's standard input and output.

The same code runs at both ends, on the host and inside: standard library only. A frame is one byte
that numbers the socket, four bytes of length, and data; no data means the end.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

_CONTROL: Final = 0
"""The supervisor's own socket. The others are channels of the program."""
_HEAD: Final = struct.Struct(">BI")
_READ_BYTES: Final = 65_536
_SET_DUMPABLE: Final = 4
_FLUSH_SECONDS: Final = 5.0


def start(sockets: Sequence[int], link_out: int, link_in: int) -> list[threading.Thread]:
    """Start to relay data both ways; return the threads, the one that sends first."""
    threads = [
        threading.Thread(target=_forward, args=(sockets, link_out), daemon=True),
        threading.Thread(target=_receive, args=(sockets, link_in), daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _forward(sockets: Sequence[int], link: int) -> None:
    """Send the data of sockets over the link until the control socket ends."""
    poll = select.poll()
    for descriptor in sockets:
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            number = sockets.index(descriptor)
            try:
                data = os.read(descriptor, _READ_BYTES)
            except OSError:
                data = b""  # it was reset
            try:
                _write(link, _HEAD.pack(number, len(data)) + data)
            except OSError:
                return  # the other side is gone
            if not data:
                poll.unregister(descriptor)
                if number == _CONTROL:
                    return


def _receive(sockets: Sequence[int], link: int) -> None:
    """Write the data from the link to sockets until the link ends; then end them all."""
    with open(link, "rb", closefd=False) as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            number, length = _HEAD.unpack(head)
            data = file.read(length)
            with contextlib.suppress(OSError):  # no one reads it any more
                if data:
                    _write(sockets[number], data)
                else:
                    _shut_down(sockets[number], socket.SHUT_WR)
    for descriptor in sockets:
        _shut_down(descriptor, socket.SHUT_RDWR)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _shut_down(descriptor: int, how: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        end.shutdown(how)


def main(config: dict[str, Any]) -> None:
    """Supervise one program, as the first process of a container or a plain one.

    Args:
        config: ``channels``: their number; ``packages`` to import from; ``scratch``: a directory to
            remove at the end.
    """
    from agent_envs.sandbox import archive, supervisor  # Linux only; the host may be another system

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the program, of the same user, cannot reach into us
    sys.path += config["packages"]
    pairs = [socket.socketpair() for _ in range(1 + config["channels"])]
    control, *channels = [end for end, _ in pairs]
    link_in, link_out = os.dup(0), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    forwarding, _ = start([ours.detach() for _, ours in pairs], link_out, link_in)
    processes = supervisor.Namespace(3) if os.getpid() == 1 else supervisor.Descendants()
    supervisor.supervise(
        supervisor.receive_request(control),
        [channel.detach() for channel in channels],
        control,
        processes,
        lambda: prctl(_SET_DUMPABLE, 1, 0, 0, 0),
    )
    forwarding.join(_FLUSH_SECONDS)
    if "scratch" in config:
        os.chdir("/")
        archive.remove_tree(config["scratch"])  # the host may be gone
