"""Tools to run programs in a sandbox: a program to its end, tests against it, a Python session."""

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar, cast, get_args

from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError, SandboxError
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
"""A large folder is kept on disk, once for all snapshots of it; see `Folder`."""
BROKEN_TEXT: Final = "[the program broke its sandbox]"
_LOGGER: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_OPENING: Final = threading.Lock()
SandboxChoice: TypeAlias = Level | str | Sandbox
"""A level; a level and an image, ``"container:my-image:1.0"``; a `Sandbox`, or the import path of
one or of a function that opens one, ``"my_module:open_mine"``."""
_SHARED: Final[dict[str, Sandbox]] = {}
_STATUS_TEXTS: Final = {
    "timeout": "[stopped: it took longer than {limits.wall_seconds:g} seconds]",
    "cpu_limit": "[stopped: it took longer than {limits.cpu_seconds:g} seconds]",
    "memory_limit": "[stopped: it needed more than {limits.memory_mb} MB of memory]",
    "process_limit": "[stopped: it had more than {limits.processes} processes]",
    "output_limit": "[stopped: it wrote more than {limits.output_chars} characters]",
}
_BROKEN: Final = Result(status="error", exit_code=None, stdout="", stderr=BROKEN_TEXT)
_SESSION_ENDED_TEXT: Final = "The session has ended; a new one begins, without its variables."


def shared_sandbox(choice: SandboxChoice) -> Sandbox:
    """Return the sandbox that all environments of this process with this choice share."""
    if isinstance(choice, Sandbox):
        return choice
    with _OPENING:
        if choice not in _SHARED:
            _SHARED[choice] = _open(choice)
            atexit.register(_SHARED[choice].close)
        return _SHARED[choice]


def _open(choice: str) -> Sandbox:
    level, _, image = choice.partition(":")
    if level in get_args(Level) or not image:
        return open_sandbox(cast(Level, level), image=image or None)
    found: Any = lookup_or_import({}, choice, kind="sandbox")
    sandbox = found if isinstance(found, Sandbox) else found()
    if not isinstance(sandbox, Sandbox):
        raise ConfigurationError(f"sandbox={choice!r} is no Sandbox but {sandbox!r:.80}.")
    return sandbox


def run_python(choice: SandboxChoice, source: str) -> Result:
    """Run a program in the shared sandbox; if it breaks the sandbox, it has failed."""
    return _retry(choice, lambda sandbox: sandbox.run_python(source, limits=LIMITS), _BROKEN)


def run_shell(choice: SandboxChoice, script: str, folder: Folder) -> Result:
    """Run a script in a folder, in the shared sandbox; if it breaks the sandbox, it has failed."""
    options: Any = {"files": folder, "limits": SHELL_LIMITS, "collect_files": True}
    return _retry(choice, lambda sandbox: sandbox.run_shell(script, **options), _BROKEN)


def judge(choice: SandboxChoice, program: str, tests: str, **options: Any) -> Verdict:
    """Judge a program (see `Sandbox.check_python`); if it breaks the sandbox, it has failed."""
    options["limits"] = JUDGING_LIMITS
    failed = Verdict(passed=False, reason="exited", message=BROKEN_TEXT)
    return _retry(choice, lambda sandbox: sandbox.check_python(program, tests, **options), failed)


def _retry(choice: SandboxChoice, use: Callable[[Sandbox], _T], failed: _T) -> _T:
    """Use the shared sandbox, a second time if it fails; return `failed` if both fail.

    Raises:
        SandboxError: If an empty program fails, too: the machine is the cause.
    """
    for _ in range(2):
        try:
            return use(shared_sandbox(choice))
        except SandboxError as error:
            _LOGGER.warning("The sandbox failed: %s", error)
    shared_sandbox(choice).run_python("")
    return failed


class PythonSession:
    """The tool ``python(code)``: variables are kept from call to call, until the next episode."""

    def __init__(self, sandbox: SandboxChoice) -> None:
        """Choose the sandbox; the session starts with the first call."""
        self._choice = sandbox
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """Run Python; variables stay for the next call, and a last expression's value is shown.

        Args:
            code: What to run.
        """
        try:
            if self._session is None:
                self._session = shared_sandbox(self._choice).session(LIMITS)
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
