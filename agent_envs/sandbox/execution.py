"""A started program, seen from the host: its output, read under a limit, and its end."""

import codecs
import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, TypeAlias

from agent_envs.errors import SandboxError
from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.launching import Launcher
from agent_envs.sandbox.results import Limits, Result, Status

_GRACE_SECONDS: Final = 15.0
"""How much longer than its limit a program may take before its supervisor counts as broken."""
_READ_BYTES: Final = 65_536
_FRAME_HEAD: Final = 5
_REPORT_BYTES: Final = 48 << 20
"""Space for names in a folder, in addition to the content of files, and for the report."""
_CRASH_TEXT: Final = "[the program ended together with its supervisor]\n"


Files: TypeAlias = Mapping[str, str | bytes] | Folder


def make_request(
    mode: str, source: str, files: Files | None = None, stdin: str = "", **options: bool
) -> dict[str, Any]:
    """Return a request to run a program; see `program.run` for the modes.

    Raises:
        ConfigurationError: If a path leads out of the scratch directory.
    """
    folder = files if isinstance(files, Folder) else Folder.of(files) if files else None
    archive = folder.archive if folder else b""
    request = {"mode": mode, "source": source, "stdin": stdin, "archive": archive}
    return {**request, "collect_files": False, **options}


class Execution:
    """A program from its start to its end; a context manager that ends it."""

    def __init__(
        self,
        launcher: Launcher,
        request: dict[str, Any],
        limits: Limits,
        channels: Sequence[int] = (),
    ) -> None:
        """Start a program.

        Args:
            launcher: Starts the supervisor.
            request: See `make_request`.
            limits: Limits of the program.
            channels: Further descriptors for it; owned and closed here.
        """
        self._launcher = launcher  # keep it alive as long as its program
        self._limits = limits
        self._reports = _Reports((limits.scratch_mb << 20) + _REPORT_BYTES)
        self._has_ended = self._is_late = self._is_over_output = False
        theirs: list[int] = list(channels)
        self._control, control = socket.socketpair()
        self._outputs: dict[int, _Capture] = {}
        try:
            for position in range(2):
                read, write = os.pipe()
                theirs.insert(position, write)
                os.set_blocking(read, False)
                self._outputs[read] = _Capture(limits.output_chars)
            self._clean_up = launcher.start(theirs, control, limits)
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            control.close()
            for descriptor in theirs:
                os.close(descriptor)
        self._control.settimeout(_GRACE_SECONDS)
        archive = request.pop("archive")
        request["limits"] = asdict(limits) | {"longest_seconds": limits.longest_seconds}
        data = json.dumps({**request, "archive_bytes": len(archive)}).encode()
        self._send(len(data).to_bytes(4, "big") + data + archive)

    def begin_call(self) -> None:
        """Start the clock of one call of a session."""
        self._outputs = {each: _Capture(self._limits.output_chars) for each in self._outputs}
        self._send(b"c")

    def end_call(self) -> None:
        """Stop the clock, and all processes until the next call."""
        self._send(b"d")

    def stop(self) -> None:
        """Request the end of every process; `wait` then returns soon."""
        with contextlib.suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, until: int = -1) -> bool:
        """Read output until the program and all processes that it started have ended.

        Args:
            until: A descriptor; once it can be read, `wait` returns early.

        Returns:
            Whether it returned early.
        """
        deadline = time.monotonic() + self._limits.longest_seconds + _GRACE_SECONDS
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for descriptor in [*self._outputs, *([until] if until >= 0 else [])]:
            poll.register(descriptor, select.POLLIN)
        while not self._has_ended:
            left = deadline - time.monotonic()
            if left < 0:  # also while output comes, so that no output can put it off
                self._has_ended = self._is_late = True
                break
            ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            for descriptor in ready.intersection(self._outputs):
                if not self._read_output(descriptor):
                    poll.unregister(descriptor)
            if self._control.fileno() in ready:
                data = self._receive()
                # The last frame counts: another fork of this process may keep the other end open.
                self._has_ended = not data or self._reports.add(data)
            if until in ready and not self._is_over_output:
                self._read_all_output()
                return not self._is_over_output
        self._read_all_output()
        return False

    def finish(self) -> Result:
        """Wait for the end, and return the result."""
        self.wait()
        return self.result()

    def result(self) -> Result:
        """Return the result of a program that has ended.

        Raises:
            SandboxError: If it could not be started. After its start, every failure is a result:
                a program must not be able to pass as a failure of the sandbox.
        """
        stdout, stderr = self._texts()
        report = self._reports.last
        if self._is_late:
            report = {"ended_by": "timeout", "exit_code": None}
        elif report is None and self._reports.has_started:
            return Result(status="error", exit_code=-9, stdout=stdout, stderr=stderr + _CRASH_TEXT)
        elif report is None or "failure" in report:
            failure = (report or {}).get("failure", "its process ended before the program began")
            raise SandboxError(f"A sandbox could not run its program: {failure}.")
        status: Any = "output_limit" if self._is_over_output else report["ended_by"]
        if status in ("exit", "stopped"):
            # A refused allocation is Python's own error: the limit on the address space.
            is_memory = stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
            failed = "memory_limit" if is_memory else "error"
            status = "ok" if report["exit_code"] == 0 else failed
        return Result(
            status=status,
            exit_code=report["exit_code"] if status in ("ok", "error") else None,
            stdout=stdout,
            stderr=stderr,
            folder=self._reports.folder,
            left_out=tuple(report.get("left_out", ())),
        )

    def partial_result(self, *, is_ok: bool) -> Result:
        """Return the result of one call of a session."""
        stdout, stderr = self._texts()
        status: Status = "ok" if is_ok else "error"
        return Result(status=status, exit_code=int(not is_ok), stdout=stdout, stderr=stderr)

    def __enter__(self) -> "Execution":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the program if it still runs, and clean up."""
        try:
            if not self._has_ended and not isinstance(error, SandboxError):
                self.stop()
                self.wait()
        finally:
            self._close_descriptors()
            self._clean_up()

    def _texts(self) -> tuple[str, str]:
        stdout, stderr = (capture.text() for capture in self._outputs.values())
        return stdout, stderr

    def _read_output(self, descriptor: int) -> bool:
        """Read once; return whether more may come. What exceeds the limit is dropped."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not self._outputs[descriptor].add(data) and not self._is_over_output:
            self._is_over_output = True
            self.stop()
        return bool(data)

    def _read_all_output(self) -> None:
        for descriptor in self._outputs:
            while not self._is_over_output and self._read_output(descriptor):
                pass

    def _receive(self) -> bytes:
        try:
            return self._control.recv(_READ_BYTES)
        except OSError:
            return b""

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; `wait` notices
            self._control.sendall(data)

    def _close_descriptors(self) -> None:
        for descriptor in self._outputs:
            os.close(descriptor)
        self._outputs = {}
        self._control.close()


class _Reports:
    """The frames of the supervisor (see `supervisor.send_frame`)."""

    def __init__(self, max_bytes: int) -> None:
        self.has_started = False
        self.last: dict[str, Any] | None = None
        self._received, self._archive = bytearray(), bytearray()
        self._max_bytes = max_bytes

    def add(self, data: bytes) -> bool:
        """Add received data; return whether it was the last."""
        self._received += data
        while len(self._received) >= _FRAME_HEAD:
            end = _FRAME_HEAD + int.from_bytes(self._received[1:_FRAME_HEAD], "big")
            if end + len(self._archive) > self._max_bytes:
                return True  # our supervisor never sends that much
            if len(self._received) < end:
                return False
            kind, content = self._received[:1], self._received[_FRAME_HEAD:end]
            del self._received[:end]
            if kind == b"s":
                self.has_started = True
            elif kind == b"f":
                self._archive += content
            else:
                with contextlib.suppress(ValueError):
                    self.last = json.loads(content)
                return True
        return False

    @property
    def folder(self) -> Folder | None:
        """The folder, if one was sent completely."""
        is_whole = self.last is not None and self._archive
        return Folder(bytes(self._archive)) if is_whole else None


class _Capture:
    """Text as it comes in, up to a number of characters."""

    def __init__(self, max_chars: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts: list[str] = []
        self._left = max_chars

    def add(self, data: bytes) -> bool:
        """Add output; return whether it still fits."""
        text = self._decoder.decode(data)
        self._parts.append(text[: self._left])
        fits = len(text) <= self._left
        self._left -= min(len(text), self._left)
        return fits

    def text(self) -> str:
        """Return all of it."""
        return "".join(self._parts) + self._decoder.decode(b"", final=True)[: self._left]
