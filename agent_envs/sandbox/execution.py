"""A started program, seen from the host."""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from agent_envs.errors import SandboxError
from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.results import Limits, Result

_GRACE_SECONDS: Final = 15.0
"""How much longer than its limit a program may take before its supervisor counts as broken."""
_READ_BYTES: Final = 65_536
_FRAME_HEAD: Final = 5
_REPORT_BYTES: Final = 48 << 20
"""Space for names in a folder, in addition to the content of files, and for the report."""
_CRASH_TEXT: Final = "[the program ended together with its supervisor]\n"


Files: TypeAlias = Mapping[str, str | bytes] | Folder


class Execution(contextlib.AbstractContextManager["Execution"]):
    """A program from its start to its end; a context manager that ends it."""

    def __init__(
        self, launcher: Any, mode: str, source: str, limits: Limits,
        *, files: Files | None = None, collect_files: bool = False,
    ) -> None:  # fmt: skip
        """Start a program; `mode` is that of `program.run`.

        Its directory contains `files` at the beginning; with `collect_files` the result contains
        it.
        """
        self._launcher = launcher  # keep it alive as long as its program
        self._limits = limits
        self._bytes_left = (limits.scratch_mb << 20) + _REPORT_BYTES
        self._has_started = self._has_ended = self._is_late = self._is_closed = False
        self._received = bytearray()
        self._folder: Folder | None = None
        self._report: dict[str, Any] | None = None
        folder = files if isinstance(files, Folder) else Folder.of(files) if files else None
        self._control, self._clean_up = launcher.start(limits)
        request = {
            "mode": mode, "source": source, "collect_files": collect_files,
            "limits": asdict(limits) | {"longest_seconds": limits.longest_seconds},
        }  # fmt: skip
        self._send(json.dumps(request).encode())
        self._send(folder.archive if folder else b"")

    def exchange(self, message: bytes | None = None) -> bytes:
        """Send a message to the program, if there is one, and return its next message.

        Messages are lines; that of a session is a JSON object of its ``reply`` and its output. An
        empty one, in both directions: there will be no other.
        """
        if message is not None:
            self._send(message)
        deadline = time.monotonic() + self._limits.longest_seconds + _GRACE_SECONDS
        while (received := self._read_frames()) is None and not self._has_ended:
            self._control.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._control.recv(_READ_BYTES)
            except TimeoutError:
                data, self._is_late = b"", True
            except OSError:
                data = b""
            self._has_ended = not data
            self._received += data
        return received or b""

    def stop(self) -> None:
        """Request the end of every process; `finish` then returns soon."""
        with contextlib.suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_WR)

    def _send(self, data: bytes) -> None:
        self._control.settimeout(_GRACE_SECONDS)
        with contextlib.suppress(OSError):  # it has ended; `exchange` notices
            self._control.sendall(len(data).to_bytes(4, "big") + data)

    def finish(self) -> Result:
        """Wait for the end, and return the result.

        Raises:
            SandboxError: If it could not be started. After its start, every failure is a result:
                a program must not be able to pass as a failure of the sandbox.
        """
        while not self._has_ended:
            self.exchange()
        report = self._report or {}
        if self._is_late:
            seconds = self._limits.longest_seconds + _GRACE_SECONDS
            return Result(status="timeout", exit_code=None, stdout="", stderr="", seconds=seconds)
        if "exit_code" not in report:
            if self._has_started:
                return Result(status="error", exit_code=-9, stdout="", stderr=_CRASH_TEXT)
            reason = report.get("failure", "its supervisor ended at once")
            raise SandboxError(f"The program could not be started: {reason}.")
        status, stderr = report["ended_by"], report["stderr"]
        if status in ("exit", "stopped"):
            # A refused allocation is Python's own error: the limit on the address space.
            is_memory = stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
            failed = "memory_limit" if is_memory else "error"
            status = "ok" if report["exit_code"] == 0 else failed
        return Result(
            status=status,
            exit_code=report["exit_code"] if status in ("ok", "error") else None,
            stdout=report["stdout"],
            stderr=stderr,
            folder=self._folder,
            left_out=tuple(report.get("left_out", ())),
            **{name: report[name] for name in ("seconds", "peak_memory_mb", "denied_calls")},
        )

    def __exit__(self, *_: object) -> None:
        """End the program if it still runs, and clean up; a second time, do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.stop()
            while not self._has_ended:
                self.exchange()
        finally:
            self._control.close()
            self._clean_up()

    def _read_frames(self) -> bytes | None:
        """Read received frames (see `supervisor.send_frame`) up to a message; return it."""
        while len(self._received) >= _FRAME_HEAD:
            end = _FRAME_HEAD + int.from_bytes(self._received[1:_FRAME_HEAD], "big")
            if end > self._bytes_left:
                self._has_ended = True  # our supervisor never sends that much
                break
            if len(self._received) < end:
                break
            kind, content = self._received[:1], bytes(self._received[_FRAME_HEAD:end])
            del self._received[:end]
            if kind == b"m":
                return content
            if kind == b"s":
                self._has_started = True
            elif kind == b"f":
                self._folder = Folder(content)
            else:
                self._report = json.loads(content)
                # The last frame counts: another fork of this process may keep the other end open.
                self._has_ended = True
        return None
