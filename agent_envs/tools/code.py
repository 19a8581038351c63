"""Tools to run programs in a sandbox: a program to its end, tests against it, a Python session."""

import atexit
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from agent_envs.core.tool import Tool, ToolResult
from agent_envs.errors import SnapshotError
from agent_envs.sandbox import Level, Limits, Result, Sandbox, Session, Verdict, open_sandbox

LIMITS: Final = Limits(wall_seconds=5.0, cpu_seconds=5.0, output_chars=6_000)
_OPENING: Final = threading.Lock()
_STATUS_TEXTS: Final = {
    "timeout": "[stopped: it took longer than {limits.wall_seconds:g} seconds]",
    "cpu_limit": "[stopped: it took longer than {limits.cpu_seconds:g} seconds]",
    "memory_limit": "[stopped: it needed more than {limits.memory_mb} MB of memory]",
    "output_limit": "[stopped: it wrote more than {limits.output_chars} characters]",
}
_SESSION_ENDED_TEXT: Final = "The session has ended; a new one begins, without its variables."


@cache
def _open_shared(level: Level) -> Sandbox:
    sandbox = open_sandbox(level)
    atexit.register(sandbox.close)
    return sandbox


def shared_sandbox(level: Level) -> Sandbox:
    """Return the sandbox that all environments of this process share."""
    with _OPENING:
        return _open_shared(level)


def make_run_code_tool(sandbox: Sandbox, on_result: Callable[[Result], None]) -> Tool:
    """Make the tool ``run_code(code)``; `on_result` is told what each program did."""

    def run_code(code: str) -> ToolResult:
        """Run a Python program and see what it prints.

        Args:
            code: The whole program.
        """
        result = sandbox.run_python(code, limits=LIMITS)
        on_result(result)
        return ToolResult(describe(result), data={"status": result.status})

    return Tool(run_code, timeout=None)  # the sandbox keeps the time


def make_run_tests_tool(
    check: Callable[[str], Sequence[tuple[str, Verdict]]], on_result: Callable[[int, int], None]
) -> Tool:
    """Make the tool ``run_tests(code)``.

    `check` runs each public test; `on_result` is told how many passed, and of how many.
    """

    def run_tests(code: str) -> ToolResult:
        """Run the public tests against a Python program.

        Args:
            code: The whole program.
        """
        outcomes = check(code)
        if not outcomes:
            return ToolResult("There are no public tests.", data={"passed": 0, "total": 0})
        num_passed = sum(verdict.passed for _, verdict in outcomes)
        on_result(num_passed, len(outcomes))
        lines = [f"{_outcome(verdict)}: {test}" for test, verdict in outcomes]
        text = "\n".join([*lines, f"{num_passed} of {len(outcomes)} passed."])
        return ToolResult(text, data={"passed": num_passed, "total": len(outcomes)})

    return Tool(run_tests, timeout=None)


class PythonSession:
    """The tool ``python(code)``: variables last from call to call, until the next episode."""

    def __init__(self, level: Level) -> None:
        """Isolate at `level`; the session begins with the first call."""
        self._level = level
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Save that there is no session yet; one that runs is a process, and cannot be saved."""
        if self._session is not None:
            raise SnapshotError("a Python session that has run something cannot be copied")
        return vars(self).copy()

    @property
    def tool(self) -> Tool:
        """The tool."""
        return Tool(self.python, timeout=None)

    def python(self, code: str) -> str:
        """Run Python; variables stay for the next call, and a last expression's value is shown.

        Args:
            code: What to run.
        """
        if self._session is None:
            self._session = shared_sandbox(self._level).session(LIMITS)
        result = self._session.run(code)
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


def _outcome(verdict: Verdict) -> str:
    return "passed" if verdict.passed else f"FAILED ({verdict.message or verdict.reason})"


def describe(result: Result) -> str:
    """Return what a model is shown of a program's end."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if (stopped := _STATUS_TEXTS.get(result.status)) is not None:
        parts.append(stopped.format(limits=LIMITS))
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"
