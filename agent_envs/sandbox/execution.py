"""One started program, seen from the host: its output, read under a cap, and its end."""

import codecs
import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, Protocol

from agent_envs.errors import SandboxError
from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.limits import Level, Limits, Result, Status

_GRACE_SECONDS: Final = 15.0
"""How much longer than its limit a program may take before its supervisor counts as broken."""
_READ_BYTES: Final = 65_536
_FRAME_HEAD: Final = 5
_FOLDER_OVERHEAD: Final = 48 << 20
"""Names and links that a folder may hold, in bytes, beside the contents of its files."""
_CRASH_TEXT: Final = "[the program ended together with what watched it]\n"


class Launcher(Protocol):
    """Starts programs at one level of isolation."""

    level: Level

    def start(
        self, descriptors: Sequence[int], control: socket.socket, limits: Limits
    ) -> Callable[[], None]:
        """Start a supervisor that takes its request from `control`.

        Args:
            descriptors: The program's standard input, output and error, and further ones.
            control: The supervisor's end of the connection.
            limits: What the program may use.

        Returns:
            What to call when the program has ended, to clean up after it.

        Raises:
            SandboxError: If it cannot be started.
        """

    def close(self) -> None:
        """End everything that still runs."""


class Execution:
    """A program from its start to its end; a context manager that ends it."""

    def __init__(
        self,
        launcher: Launcher,
        request: dict[str, Any],
        limits: Limits,
        *,
        stdin: bytes = b"",
        channels: Sequence[int] = (),
    ) -> None:
        """Start a program.

        Args:
            launcher: What starts it.
            request: See `supervisor.supervise`.
            limits: What it may use.
            stdin: What it reads.
            channels: Further descriptors for it; its own after this, and closed here.
        """
        self._launcher = launcher  # lives as long as its program, whoever else lets go of it
        self._limits, self._stdin = limits, memoryview(stdin)
        self._reports = _Reports((limits.scratch_mb << 20) + _FOLDER_OVERHEAD)
        self._has_ended = self._is_late = False
        self.is_over_output = False
        theirs: list[int] = list(channels)
        self._control, control = socket.socketpair()
        self._in = self._out = self._err = -1
        try:
            for name in ("_err", "_out", "_in"):
                read, write = os.pipe()
                theirs.insert(0, read if name == "_in" else write)
                setattr(self, name, write if name == "_in" else read)
                os.set_blocking(getattr(self, name), False)
            self._clean_up = launcher.start(theirs, control, limits)
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            control.close()
            for descriptor in theirs:
                os.close(descriptor)
        self._outputs = {self._out: _Capture(limits), self._err: _Capture(limits)}
        self._control.settimeout(_GRACE_SECONDS)
        folder = request["folder"].archive if request["folder"] is not None else b""
        told_limits = asdict(limits) | {"longest_seconds": limits.longest_seconds}
        told = {**request, "folder_bytes": len(folder), "limits": told_limits}
        del told["folder"]
        data = json.dumps(told).encode()
        self._send(len(data).to_bytes(4, "big") + data + folder)

    def begin_call(self) -> None:
        """Start the clock of one call of a session."""
        self._outputs = {self._out: _Capture(self._limits), self._err: _Capture(self._limits)}
        self._send(b"c")

    def end_call(self) -> None:
        """Stop the clock, and all processes until the next call."""
        self._send(b"d")

    def stop(self) -> None:
        """Ask for the end of every process; `wait` then returns soon."""
        with contextlib.suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, until: int = -1) -> bool:
        """Pass input and output along until the program and all it started have ended.

        Args:
            until: A descriptor; once it can be read, `wait` returns early.

        Returns:
            Whether it returned early.
        """
        deadline = time.monotonic() + self._limits.longest_seconds + _GRACE_SECONDS
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for descriptor in (self._out, self._err):
            poll.register(descriptor, select.POLLIN)
        if until >= 0:
            poll.register(until, select.POLLIN)
        if self._stdin:
            poll.register(self._in, select.POLLOUT)
        else:
            self._close_stdin()
        while not self._has_ended:
            left = deadline - time.monotonic()
            if left < 0:  # looked at also while output comes, so that none can put it off
                self._has_ended = self._is_late = True
                break
            events = poll.poll(left * 1000)
            for descriptor, _ in events:
                self._handle(descriptor, poll)
            if any(descriptor == until for descriptor, _ in events) and not self.is_over_output:
                self._drain()
                return not self.is_over_output
        if not self.is_over_output:
            self._drain()
        return False

    def result(self) -> Result:
        """Return what it did, once it has ended.

        Raises:
            SandboxError: If it could not be started. From its start on, whatever breaks is a
                result that says so: a program cannot choose to be a fault of the sandbox.
        """
        stdout, stderr = (capture.text() for capture in self._outputs.values())
        report = self._reports.last
        if self._is_late:
            report = {"ended_by": "timeout", "exit_code": None}
        elif report is None and self._reports.has_started:
            return Result(status="error", exit_code=-9, stdout=stdout, stderr=stderr + _CRASH_TEXT)
        elif report is None or "failure" in report:
            failure = (report or {}).get("failure", "its process ended before the program began")
            raise SandboxError(f"A sandbox could not run its program: {failure}.")
        status = self._status(report, stderr)
        return Result(
            status=status,
            exit_code=report["exit_code"] if status in ("ok", "error") else None,
            stdout=stdout,
            stderr=stderr,
            folder=self._reports.folder(),
            left_out=tuple(report.get("left_out", ())),
        )

    def partial_result(self, *, is_ok: bool) -> Result:
        """Return what one call of a session did."""
        stdout, stderr = (capture.text() for capture in self._outputs.values())
        return Result(
            status="ok" if is_ok else "error",
            exit_code=0 if is_ok else 1,
            stdout=stdout,
            stderr=stderr,
        )

    def __enter__(self) -> "Execution":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the program if it still runs, and clean up after it."""
        try:
            if not self._has_ended and not isinstance(error, SandboxError):
                self.stop()
                self.wait()
        finally:
            self._close_descriptors()
            self._clean_up()

    def _status(self, report: dict[str, Any], stderr: str) -> Status:
        if self.is_over_output:
            return "output_limit"
        ended_by: Status | str = report["ended_by"]
        if ended_by in ("timeout", "cpu_limit", "memory_limit", "process_limit"):
            return ended_by
        if report["exit_code"] == 0:
            return "ok"
        # Python's own word for a refused allocation: the limit on the address space.
        last_line = stderr.rstrip().rpartition("\n")[2]
        return "memory_limit" if last_line.startswith("MemoryError") else "error"

    def _handle(self, descriptor: int, poll: select.poll) -> None:
        if descriptor == self._control.fileno():
            data = self._receive()
            # The last frame is there: another fork of this process may hold the other end open.
            self._has_ended = not data or self._reports.add(data)
        elif descriptor == self._in:
            self._write_stdin(poll)
        elif descriptor in self._outputs:
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                poll.unregister(descriptor)
            elif not self._outputs[descriptor].add(data):
                self.is_over_output = True  # what still comes is read and dropped
                self.stop()

    def _receive(self) -> bytes:
        try:
            return self._control.recv(_READ_BYTES)
        except OSError:
            return b""

    def _drain(self) -> None:
        """Read what has been written so far."""
        for descriptor, capture in self._outputs.items():
            while True:
                try:
                    data = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                if not capture.add(data):
                    self.is_over_output = True
                    break

    def _write_stdin(self, poll: select.poll) -> None:
        try:
            self._stdin = self._stdin[os.write(self._in, self._stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]  # it did not want to read it all
        if not self._stdin:
            poll.unregister(self._in)
            self._close_stdin()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; `wait` sees that
            self._control.sendall(data)

    def _close_stdin(self) -> None:
        if self._in >= 0:
            os.close(self._in)
            self._in = -1

    def _close_descriptors(self) -> None:
        self._close_stdin()
        for name in ("_out", "_err"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
        self._control.close()


class _Reports:
    """What the supervisor says, frame by frame (see `supervisor.send_frame`)."""

    def __init__(self, max_bytes: int) -> None:
        self.has_started = False
        self.last: dict[str, Any] | None = None
        self._received = bytearray()
        self._folder: list[bytes] = []
        self._bytes_left = max_bytes

    def add(self, data: bytes) -> bool:
        """Take more; return whether nothing more is to come."""
        self._received += data
        while len(self._received) >= _FRAME_HEAD:
            length = int.from_bytes(self._received[1:_FRAME_HEAD], "big")
            if length > self._bytes_left:
                return True  # no supervisor of ours says that much
            if len(self._received) < _FRAME_HEAD + length:
                return False
            kind = self._received[:1]
            content = bytes(memoryview(self._received)[_FRAME_HEAD : _FRAME_HEAD + length])
            del self._received[: _FRAME_HEAD + length]
            if kind == b"s":
                self.has_started = True
            elif kind == b"f":
                self._folder.append(content)
                self._bytes_left -= length
            else:
                self.last = _parse_report(content)
                return True
        return False

    def folder(self) -> Folder | None:
        """Return the folder that came, if one did, and whole."""
        folder = Folder(b"".join(self._folder))
        return folder if self.last is not None and folder.is_whole() else None


def _parse_report(content: bytes) -> dict[str, Any] | None:
    try:
        report = json.loads(content)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


class _Capture:
    """Text as it comes in, up to a limit."""

    def __init__(self, limits: Limits) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts: list[str] = []
        self._left = limits.output_chars

    def add(self, data: bytes) -> bool:
        """Take more output; return whether it still fits."""
        text = self._decoder.decode(data)
        self._parts.append(text[: self._left])
        fits = len(text) <= self._left
        self._left -= min(len(text), self._left)
        return fits

    def text(self) -> str:
        """Return all of it."""
        return "".join(self._parts) + self._decoder.decode(b"", final=True)[: self._left]
