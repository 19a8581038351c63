"""Tools to run programs in a sandbox: a program to its end, tests against it, a Python session."""

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from agent_envs.errors import SandboxError
from agent_envs.sandbox import (
    Folder,
    Level,
    Limits,
    Result,
    Sandbox,
    Session,
    Verdict,
    open_sandbox,
)

LIMITS: Final = Limits(wall_seconds=5.0, cpu_seconds=5.0, output_chars=6_000)
JUDGING_LIMITS: Final = Limits(wall_seconds=20.0, cpu_seconds=5.0, output_chars=6_000)
"""Programs are judged by processor time; the wall clock ends those that only sleep."""
SHELL_LIMITS: Final = Limits(wall_seconds=5.0, cpu_seconds=5.0, output_chars=6_000, scratch_mb=16)
"""A folder is kept in memory, in every snapshot, so it is small."""
BROKEN_TEXT: Final = "[the program broke its sandbox]"
_LOGGER: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_OPENING: Final = threading.Lock()
_SHARED: Final[dict[Level, Sandbox]] = {}
_STATUS_TEXTS: Final = {
    "timeout": "[stopped: it took longer than {limits.wall_seconds:g} seconds]",
    "cpu_limit": "[stopped: it took longer than {limits.cpu_seconds:g} seconds]",
    "memory_limit": "[stopped: it needed more than {limits.memory_mb} MB of memory]",
    "process_limit": "[stopped: it had more than {limits.processes} processes]",
    "output_limit": "[stopped: it wrote more than {limits.output_chars} characters]",
}
_BROKEN: Final = Result(status="error", exit_code=None, stdout="", stderr=BROKEN_TEXT)
_SESSION_ENDED_TEXT: Final = "The session has ended; a new one begins, without its variables."


def shared_sandbox(level: Level) -> Sandbox:
    """Return the sandbox that all environments of this process share."""
    with _OPENING:
        if level not in _SHARED:
            _SHARED[level] = open_sandbox(level)
            atexit.register(_SHARED[level].close)
        return _SHARED[level]


def run_python(level: Level, source: str) -> Result:
    """Run a program in the shared sandbox; if it breaks the sandbox, it has failed."""
    return _retry(level, lambda sandbox: sandbox.run_python(source, limits=LIMITS), _BROKEN)


def run_shell(level: Level, script: str, folder: Folder) -> Result:
    """Run a script in a folder, in the shared sandbox; if it breaks the sandbox, it has failed."""
    options: Any = {"files": folder, "limits": SHELL_LIMITS, "collect_files": True}
    return _retry(level, lambda sandbox: sandbox.run_shell(script, **options), _BROKEN)


def judge(level: Level, program: str, tests: str, **options: Any) -> Verdict:
    """Judge a program (see `Sandbox.check_python`); if it breaks the sandbox, it has failed."""
    options["limits"] = JUDGING_LIMITS
    failed = Verdict(passed=False, reason="exited", message=BROKEN_TEXT)
    return _retry(level, lambda sandbox: sandbox.check_python(program, tests, **options), failed)


def _retry(level: Level, use: Callable[[Sandbox], _T], failed: _T) -> _T:
    """Use the shared sandbox, a second time if it fails; return `failed` if both fail.

    Raises:
        SandboxError: If an empty program fails, too: the machine is the cause.
    """
    for _ in range(2):
        try:
            return use(shared_sandbox(level))
        except SandboxError as error:
            _LOGGER.warning("The sandbox failed: %s", error)
    shared_sandbox(level).run_python("")
    return failed


class PythonSession:
    """The tool ``python(code)``: variables are kept from call to call, until the next episode."""

    def __init__(self, level: Level) -> None:
        """Isolate at `level`; the session starts with the first call."""
        self._level = level
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """Run Python; variables stay for the next call, and a last expression's value is shown.

        Args:
            code: What to run.
        """
        try:
            if self._session is None:
                self._session = shared_sandbox(self._level).session(LIMITS)
            result = self._session.run(code)
        except SandboxError:
            self.close()
            raise
        text = describe(result)
        if self._session.is_closed:
            self.close()
            text = f"{text}\n{_SESSION_ENDED_TEXT}"
        return text

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None


def describe(result: Result) -> str:
    """Return the text of a result that a model reads."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if (stopped := _STATUS_TEXTS.get(result.status)) is not None:
        parts.append(stopped.format(limits=LIMITS))
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"
