"""How one episode of a program runs: in a thread of this process, or as a process of its own.

A process gets its task as a line of JSON on its standard input, and its endpoint in the environment
variables that OpenAI's clients read, so it can be written in any language. The last line that it
writes to its standard output is its outcome, as JSON: a number, ``{"reward": ..., "metrics":
{...}}``, or an answer for the reward function.
"""

import contextlib
import functools
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import psutil

from agent_envs.core.async_bridge import resolve
from agent_envs.core.lookup import import_path, lookup
from agent_envs.errors import ConfigurationError, RolloutError
from agent_trainers.programs.program import Program, ProgramSession, find_program

SEED_VARIABLE: Final = "AGENT_R1_SEED"
"""Holds the episode's seed."""
PASSED_ON: Final = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "PYTHONPATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "SYSTEMROOT", "OMP_NUM_THREADS"),
)
"""Variables of this process that others get; keys and tokens are not among them."""
MAX_OUTPUT_BYTES: Final = 2**20
"""What is kept of an output: its end."""
GRACE_SECONDS: Final = 10.0
"""How long a container may take to end when its command is asked to."""
_POLL_SECONDS: Final = 0.05
_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Run(Protocol):
    """One episode of a program."""

    def result(self) -> Any:
        """Run it and return what it returned; called once, in a thread of its own.

        Raises:
            Exception: Whatever the program raised, or that it failed.
        """

    def stop(self) -> None:
        """End it, as far as that can be done; from another thread, at any time."""


class ThreadRun:
    """A function that is called here. A thread cannot be ended: its endpoint is closed instead."""

    def __init__(self, program: Program, session: ProgramSession, task: dict[str, Any]) -> None:
        """Run `program` on `task`."""
        self._call = functools.partial(program, session, task)

    def result(self) -> Any:
        """Call the function; what is ``async`` is awaited."""
        return resolve(self._call())

    def stop(self) -> None:
        """Do nothing: the function learns of its end from its endpoint."""


class ProcessRun:
    """A process, with all that it starts; nothing of it is left when it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        session: ProgramSession,
        task: dict[str, Any],
        variables: Mapping[str, str],
        grace_seconds: float = 0.0,
    ) -> None:
        """Run `command` on `task`.

        Args:
            command: Its words.
            session: Its endpoint.
            task: What it reads.
            variables: Its environment beside the session's.
            grace_seconds: How long it may take to end when it is stopped; 0 kills it.
        """
        self._command, self._task, self._grace_seconds = list(command), task, grace_seconds
        self._variables = {
            **variables,
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            SEED_VARIABLE: str(session.seed),
        }
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def result(self) -> Any:
        """Run the process to its end and read its last line.

        Raises:
            RolloutError: If it fails, or says nothing that can be read; with the end of its
                standard error.
        """
        with tempfile.TemporaryFile() as told:
            told.write(json.dumps(self._task, default=str).encode() + b"\n")
            told.seek(0)
            process = self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command,
                stdin=told,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._variables,
                start_new_session=True,
            )
        try:
            written, errors = self._listen(process)
        finally:
            _end(process, self._grace_seconds)
        if self._stopped.is_set():
            raise RolloutError("the program was ended.")
        said = errors.decode("utf-8", "replace").strip()
        if process.returncode:
            how = _describe_end(process.returncode)
            raise RolloutError(f"the program {how}. The end of its standard error:\n{said}")
        return _last_line(written, said)

    def stop(self) -> None:
        """End it; `result` raises, and clears up."""
        self._stopped.set()
        process = self._process
        if process is not None and process.poll() is None:
            # Here, too: at the end of this process nobody waits for the thread of `result`.
            with contextlib.suppress(ProcessLookupError):
                if self._grace_seconds:
                    process.terminate()
                else:
                    os.killpg(process.pid, signal.SIGKILL)

    def _listen(self, process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
        """Keep the end of what it writes, until it has ended or is stopped."""
        assert process.stdout is not None
        assert process.stderr is not None
        tails = {process.stdout: b"", process.stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in tails:
                selector.register(pipe, selectors.EVENT_READ)
            while not self._stopped.is_set() and selector.get_map():
                # What it left running may hold its pipes: its own end is what counts.
                has_ended = process.poll() is not None
                ready = selector.select(0.0 if has_ended else _POLL_SECONDS)
                for key, _ in ready:
                    chunk = os.read(key.fd, 2**16)
                    tails[key.fileobj] = (tails[key.fileobj] + chunk)[-MAX_OUTPUT_BYTES:]  # type: ignore[index]
                    if not chunk:
                        selector.unregister(key.fileobj)
                if has_ended and not ready:
                    break
        while not self._stopped.is_set() and process.poll() is None:  # it closed its pipes
            time.sleep(_POLL_SECONDS)
        return tails[process.stdout], tails[process.stderr]


def make_runner(
    kind: str, program: str | Program, variables: Sequence[str] = ()
) -> Callable[[ProgramSession, dict[str, Any]], Run]:
    """Return what runs an episode of a program.

    Args:
        kind: A key of `RUNNERS`.
        program: ``my_module:my_function``, a command line, or a function, for threads.
        variables: Names of environment variables that a process gets beside `PASSED_ON`.

    Raises:
        UnknownNameError: If there is no such kind, or no such function.
        ConfigurationError: If they do not go together, or a command is not there.
    """
    lookup(RUNNERS, kind, kind="program runner")
    if not isinstance(program, str):
        if kind != "thread":
            program = import_path(program, kind="program")
        else:
            return functools.partial(ThreadRun, program)
    is_function = _FUNCTION.fullmatch(program) is not None
    if kind == "thread":
        if not is_function:
            raise ConfigurationError(
                f"--program {program!r} is no 'module:function', so it runs as a process: add "
                "--program_runner process, or container."
            )
        if variables:
            raise ConfigurationError(
                "--program_env is for --program_runner process or container: a thread sees all of "
                "this process's variables."
            )
        return functools.partial(ThreadRun, find_program(program))
    if is_function and kind == "container":
        raise ConfigurationError(
            f"--program {program!r} is a function of this machine. With --program_runner container "
            "give the command that starts the container, such as 'docker run --rm -i --network "
            "host -e OPENAI_BASE_URL -e OPENAI_API_KEY image python agent.py'."
        )
    if is_function:
        find_program(program)
    command = (
        [sys.executable, "-m", "agent_trainers.programs.child", program]
        if is_function
        else shlex.split(program)
    )
    if not command or shutil.which(command[0]) is None:
        raise ConfigurationError(f"--program {program!r}: there is no command {command[:1]}.")
    if missing := [name for name in variables if name not in os.environ]:
        raise ConfigurationError(f"--program_env {missing[0]}: there is no such variable here.")
    passed = {n: os.environ[n] for n in (*PASSED_ON, *variables) if n in os.environ}
    is_container = kind == "container"
    return functools.partial(
        ProcessRun,
        command if is_container else [*apart(), *command],
        variables=passed,
        grace_seconds=GRACE_SECONDS if is_container else 0.0,
    )


RUNNERS: Final[Mapping[str, str]] = {
    "thread": "a function, in a thread of the trainer; cannot be ended, and trusted",
    "process": "a function or a command, in a process; ended by force, sees its own session only",
    "container": "a command that starts a container, such as docker run --rm -i ...",
}
"""How programs run, and what that means."""


@functools.cache
def apart() -> tuple[str, ...]:
    """Return what goes before a command so that it sees no other process; nothing where it cannot.

    A process namespace also ends everything in it with its first process.
    """
    prefix = (
        *("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child"),
        # The shell is the namespace's first process, which signals reach in part only.
        *("--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"),
    )
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return prefix if tried.returncode == 0 else ()


def _end(process: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """End a process and what it started; where it may take its time, it is asked first."""
    members = _family(process.pid)
    if grace_seconds and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _describe_end(code: int) -> str:
    # A shell, and `unshare`, say 128 + number for a signal.
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(number).name}"
    return f"exited with {code}"


def _last_line(written: bytes, said: str) -> Any:
    lines = written.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        raise RolloutError(
            "the program wrote nothing to its standard output; its last line is its outcome as "
            f"JSON, such as 1.0. The end of its standard error:\n{said}"
        )
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError):
        raise RolloutError(
            f"the program's last line is no JSON: {lines[-1][:200]!r}. It must be its outcome, "
            'such as 1.0 or {"reward": 1.0, "metrics": {}}, or its answer, in quotes.'
        ) from None
