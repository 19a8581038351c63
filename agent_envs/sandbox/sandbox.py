"""`Sandbox`: run programs, keep sessions, and judge programs by tests."""

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.sandbox.execution import Execution, Files
from agent_envs.sandbox.launching import LAUNCHERS
from agent_envs.sandbox.results import Level, Limits, Result, Verdict

_CLOSED_TEXT: Final = "The session has ended, and its variables are gone."


def open_sandbox(level: Level = "strong", *, image: str | None = None) -> "Sandbox":
    """Open a sandbox; close it after use, or use it in a ``with`` statement.

    Args:
        level: ``"strong"``: namespaces and a system-call filter. ``"container"``: one docker or
            podman container per program; ``"gvisor"``: one with the runtime ``runsc``.
            ``"limits"``: only limits on time and memory; the program sees the network and every
            file that this user sees.
        image: Only for ``"container"`` and ``"gvisor"``: another image than ``python:3.x-slim``.

    Raises:
        ConfigurationError: If `image` is given with another level.
        SandboxUnavailableError: If this machine does not offer the level. No level is ever
            replaced by a weaker one without being asked for.
        UnknownNameError: If there is no such level.
    """
    make_launcher = lookup(LAUNCHERS, level, kind="sandbox level")
    if image is not None and level not in ("container", "gvisor"):
        raise ConfigurationError(f"open_sandbox: level={level!r} uses no image={image!r}.")
    return Sandbox(make_launcher(*([] if image is None else [image])))


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Runs untrusted programs, each in an empty scratch directory; safe to use from threads."""

    def __init__(self, launcher: Any) -> None:
        """Run programs with `launcher`; see `open_sandbox`."""
        self._launcher = launcher
        self.level: Level = launcher.level
        """The level of isolation in force."""

    def run_python(
        self,
        source: str,
        *,
        files: Files | None = None,
        limits: Limits | None = None,
        collect_files: bool = False,
    ) -> Result:
        """Run a Python program to its end; its standard input is empty.

        Args:
            source: The program.
            files: Content of the scratch directory: relative path -> content, or the `Folder` of
                a result.
            limits: Limits of the program.
            collect_files: Whether `Result.folder` holds the scratch directory at the end.

        Raises:
            ConfigurationError: If a path leads out of the scratch directory.
            SandboxError: If the sandbox itself failed.
        """
        return self._run("python", source, limits, files=files, collect_files=collect_files)

    def run_shell(
        self,
        script: str,
        *,
        files: Files | None = None,
        limits: Limits | None = None,
        collect_files: bool = False,
    ) -> Result:
        """Run a script with /bin/sh; arguments and errors as for `run_python`."""
        return self._run("shell", script, limits, files=files, collect_files=collect_files)

    def session(self, limits: Limits | None = None) -> "Session":
        """Start a Python process whose state is kept from call to call.

        Args:
            limits: Limits of each call; a call that exceeds one ends the session.
        """
        return Session(self._launcher, limits or Limits())

    def check_python(
        self,
        program: str,
        tests: str,
        *,
        names: Sequence[str] | None = None,
        helpers: str = "",
        limits: Limits | None = None,
    ) -> Verdict:
        """Judge an untrusted program by trusted tests, such that it cannot fake the verdict.

        The two run in separate sandboxes, and only plain values pass between them: the tests call
        the program's functions, and compare the results where no line of the program runs. The
        program never holds the tests, the expected values, or anything that says "passed".

        Results are finite numbers, text, bytes, ranges, containers and iterators; subclasses count
        as the type they extend. Any other object is a failure, and so is a result that is or
        contains NaN or infinity: ``not abs(nan - 4) > 1e-6`` would be true. `StopIteration` and
        `SystemExit`, which would steer the tests, reach them as a plain failure. Changes of
        arguments are not seen.

        A program may still recognise the inputs it is called with, and weak tests stay weak. Tests
        cannot use the program's classes, pass functions, or catch its own exception types. At the
        level ``limits`` the program could find and change the process of the tests.

        Args:
            program: The untrusted program.
            tests: Python that raises if the program is wrong. The program's functions and common
                modules (``math``, ``re``, ...) are defined.
            names: Names that the tests take from the program. By default every name that they use
                and do not define, and that neither Python nor its library has.
            helpers: Trusted Python, such as a reference solution, which defines what the tests use
                besides `names`. Objects of its classes become, for the program, objects of the
                class of that name which the program defines, with the same attributes.
            limits: Limits of the program, tests included.
        """
        limits = limits or Limits()
        given = json.dumps([tests, names and list(names), helpers])
        # Tests wait for the program most of the time, and must outlive it to report its end.
        longer = Limits(
            wall_seconds=limits.longest_seconds + 2.0, cpu_seconds=limits.cpu_seconds + 2.0
        )
        with (
            Execution(self._launcher, "serve", program, limits) as tested,
            Execution(self._launcher, "check", given, longer) as testing,
        ):
            request = testing.exchange()
            while request:
                request = testing.exchange(tested.exchange(request))
            tests_result = testing.finish()
            tested.stop()
            return _judge(tested.finish(), tests_result)

    def close(self) -> None:
        """End every program and session."""
        self._launcher.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, mode: str, source: str, limits: Limits | None, **options: Any) -> Result:
        given = limits or Limits()
        with Execution(self._launcher, mode, source, given, **options) as execution:
            return execution.finish()


class Session(contextlib.AbstractContextManager["Session"]):
    """A Python that keeps its variables between calls, with the limits counted per call."""

    def __init__(self, launcher: Any, limits: Limits) -> None:
        self._lock = threading.Lock()
        self.is_closed = False
        """Whether it has ended: by `close`, by a limit, or because the program ended it."""
        self._execution = Execution(launcher, "session", "", limits)
        weakref.finalize(self, _end, self._execution, os.getpid())  # if it is never closed

    def run(self, source: str) -> Result:
        """Run a piece of Python; the value of a last expression is printed, as at a prompt.

        After an exception, the status is ``error`` and the session continues. A limit ends it: the
        status of that call names the limit, that of every later call is ``closed``.

        Raises:
            SandboxError: If the sandbox itself failed.
        """
        with self._lock:
            if self.is_closed:
                return Result(status="closed", exit_code=None, stdout="", stderr=_CLOSED_TEXT)
            message = self._execution.exchange(json.dumps(source).encode() + b"\n")
            output = json.loads(message) if message else {"reply": ""}
            match output.pop("reply"):
                case "true\n":
                    return Result(status="ok", exit_code=0, **output)
                case "false\n":
                    return Result(status="error", exit_code=1, **output)
            try:  # it has ended, or wrote anything there
                self._execution.stop()
                return self._execution.finish()
            finally:
                self.is_closed = True
                self._execution.__exit__()

    def close(self) -> None:
        """End it, with every process that it started."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._execution.__exit__()

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(execution: Execution, process: int) -> None:
    """End a program, but not in a fork of the process that started it."""
    if os.getpid() == process:
        execution.__exit__()


def _judge(program: Result, tests: Result) -> Verdict:
    """Combine the verdict of the tests, their last line, with the end of the program."""
    verdict = None
    with contextlib.suppress(ValueError, TypeError, IndexError):
        verdict = Verdict(**json.loads(tests.stdout.splitlines()[-1]))
    if verdict is not None and verdict.reason in ("passed", "failed"):
        return verdict
    if program.status == "timeout":
        return Verdict(passed=False, reason="timeout", message="the program took too long")
    if program.status.endswith("limit"):
        return Verdict(passed=False, reason="limit", message=f"the program hit {program.status}")
    if verdict is None:
        return Verdict(passed=False, reason="timeout", message="the tests did not finish")
    lines = program.stderr.rstrip().splitlines()
    return replace(verdict, message=lines[-1] if lines else verdict.message)
