"""A started program, seen from the host."""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from agent_envs.errors import SandboxError
from agent_envs.sandbox.folder import Folder
from agent_envs.sandbox.launching import Start
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
        self, start: Start, mode: str, source: str, limits: Limits,
        channels: Sequence[int] = (), *, files: Files | None = None, collect_files: bool = False,
    ) -> None:  # fmt: skip
        """Start a program; `mode` is that of `program.run`.

        `channels` are its descriptors after standard error; they are owned and closed here. Its
        directory contains `files` at the beginning; with `collect_files` the result contains it.
        """
        self._start = start  # keep it alive as long as its program
        self._limits = limits
        self._bytes_left = (limits.scratch_mb << 20) + _REPORT_BYTES
        self._has_started = self._has_ended = self._is_late = False
        self._received = bytearray()
        self._folder: Folder | None = None
        self._report: dict[str, Any] | None = None
        self._call_output: dict[str, Any] | None = None
        self._control, control = socket.socketpair()
        try:
            folder = files if isinstance(files, Folder) else Folder.of(files) if files else None
            self._clean_up = start(channels, control, limits)
        except BaseException:
            self._control.close()
            raise
        finally:
            control.close()
            for descriptor in channels:
                os.close(descriptor)
        self._control.settimeout(_GRACE_SECONDS)
        archive = folder.archive if folder else b""
        request = {
            "mode": mode, "source": source, "collect_files": collect_files,
            "limits": asdict(limits) | {"longest_seconds": limits.longest_seconds},
            "archive_bytes": len(archive),
        }  # fmt: skip
        data = json.dumps(request).encode()
        self.send(len(data).to_bytes(4, "big") + data + archive)

    def send(self, data: bytes) -> None:
        """Send to the supervisor: ``c`` starts the clock of a call of a session."""
        with contextlib.suppress(OSError):  # it has ended; `wait` notices
            self._control.sendall(data)

    def end_call(self) -> dict[str, Any] | None:
        """Stop the clock, and all processes until the next call; return the output of this one.

        None if the program exceeded a limit after its reply.
        """
        self._call_output = None
        self.send(b"d")
        self.wait()
        return self._call_output

    def stop(self) -> None:
        """Request the end of every process; `wait` then returns soon."""
        with contextlib.suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, until: int = -1) -> bool:
        """Wait until all processes have ended, or the output of a call came.

        Once the descriptor `until` can be read, it returns True early.
        """
        deadline = time.monotonic() + self._limits.longest_seconds + _GRACE_SECONDS
        poll = select.poll()
        for descriptor in (self._control.fileno(), until):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while not self._has_ended:
            ready = {each for each, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if self._control.fileno() in ready:
                try:
                    data = self._control.recv(_READ_BYTES)
                except OSError:
                    data = b""
                # The last frame counts: another fork of this process may keep the other end open.
                self._has_ended = not data or self._add(data)
                if self._call_output is not None:
                    break
            elif ready:
                return True
            elif time.monotonic() > deadline:
                self._has_ended = self._is_late = True
        return False

    def finish(self) -> Result:
        """Wait for the end, and return the result.

        Raises:
            SandboxError: If it could not be started. After its start, every failure is a result:
                a program must not be able to pass as a failure of the sandbox.
        """
        self.wait()
        report = self._report or {}
        if self._is_late:
            return Result(status="timeout", exit_code=None, stdout="", stderr="")
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
        )

    def __exit__(self, *_: object) -> None:
        """End the program if it still runs, and clean up."""
        try:
            if not self._has_ended:
                self.stop()
                self.wait()
        finally:
            self._control.close()
            self._clean_up()

    def _add(self, data: bytes) -> bool:
        """Add received data (see `supervisor.send_frame`); return whether it was the last."""
        self._received += data
        while len(self._received) >= _FRAME_HEAD:
            end = _FRAME_HEAD + int.from_bytes(self._received[1:_FRAME_HEAD], "big")
            if end > self._bytes_left:
                return True  # our supervisor never sends that much
            if len(self._received) < end:
                return False
            kind, content = self._received[:1], bytes(self._received[_FRAME_HEAD:end])
            del self._received[:end]
            if kind == b"s":
                self._has_started = True
            elif kind == b"f":
                self._folder = Folder(content)
            elif kind == b"o":
                self._call_output = json.loads(content)
            else:
                self._report = json.loads(content)
                return True
        return False
