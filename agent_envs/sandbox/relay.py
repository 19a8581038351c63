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

_HEAD: Final = struct.Struct(">BI")
_READ_BYTES: Final = 65_536
_SET_DUMPABLE: Final = 4
_FLUSH_SECONDS: Final = 5.0


def start(sockets: Sequence[socket.socket], link_out: int, link_in: int) -> list[threading.Thread]:
    """Start to relay data both ways; return the threads, the one that sends first.

    The first socket is the supervisor's own, the others are channels of the program.
    """
    threads = [
        threading.Thread(target=_forward, args=(sockets, link_out), daemon=True),
        threading.Thread(target=_receive, args=(sockets, link_in), daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _forward(sockets: Sequence[socket.socket], link: int) -> None:
    """Send the data of sockets over the link until the first socket ends."""
    poll = select.poll()
    numbers = {each.fileno(): number for number, each in enumerate(sockets)}
    for descriptor in numbers:
        poll.register(descriptor, select.POLLIN)
    with open(link, "wb", buffering=0, closefd=False) as file, contextlib.suppress(OSError):
        while True:  # until the other side is gone
            for descriptor, _ in poll.poll():
                number, data = numbers[descriptor], b""
                with contextlib.suppress(OSError):  # it was reset
                    data = os.read(descriptor, _READ_BYTES)
                view = memoryview(_HEAD.pack(number, len(data)) + data)
                while view:
                    view = view[file.write(view) :]
                if not data:
                    poll.unregister(descriptor)
                    if number == 0:
                        return


def _receive(sockets: Sequence[socket.socket], link: int) -> None:
    """Write the data from the link to sockets until the link ends; then end them all."""
    with open(link, "rb", closefd=False) as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            number, length = _HEAD.unpack(head)
            data = file.read(length)
            with contextlib.suppress(OSError):  # no one reads it any more
                if data:
                    sockets[number].sendall(data)
                else:
                    sockets[number].shutdown(socket.SHUT_WR)
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def main(config: dict[str, Any]) -> None:
    """Supervise one program, as the first process of a container or a plain one.

    Args:
        config: ``channels``: their number; ``scratch``: a directory to remove at the end.
    """
    from agent_envs.sandbox import archive, supervisor  # Linux only; the host may be another system

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the program, of the same user, cannot reach into us
    pairs = [socket.socketpair() for _ in range(1 + config["channels"])]
    control, *channels = [end for end, _ in pairs]
    forwarding, _ = start([ours for _, ours in pairs], sys.stdout.fileno(), sys.stdin.fileno())
    supervisor.supervise(
        supervisor.receive_request(control),
        [channel.detach() for channel in channels],
        control,
        3,  # processes and threads: this one and the relays
        lambda: prctl(_SET_DUMPABLE, 1, 0, 0, 0),
        lambda: os.write(1, _HEAD.pack(0, 5) + b"s" + bytes(4)),  # nothing else is sent yet
    )
    forwarding.join(_FLUSH_SECONDS)
    if "scratch" in config:
        os.chdir("/")
        archive.remove_tree(config["scratch"])  # the host may be gone
