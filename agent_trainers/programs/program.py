"""Programs: their session, their outcome, how one episode of them runs, and its reward.

A program is a function, ``run(session, task)``, plain or ``async``. It calls the model at
``session.base_url`` with ``session.key``, like any OpenAI-compatible server, and returns a reward.
It runs in a thread of this process, or as its own process.

A process gets its task as one line of JSON on its standard input, and its endpoint in the
environment variables that OpenAI's clients read, so it can be written in any language. The last
line of its standard output is its outcome as JSON: a number, ``{"reward": ..., "metrics": {...}}``,
or an answer for the reward function. ``python -m agent_trainers.programs.program module:function``
runs a function in this way.
"""

import contextlib
import functools
import json
import os
import re
import reprlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import IO, Annotated, Any, ClassVar, Final

import numpy as np
import psutil
import pydantic

from agent_envs.core.async_bridge import resolve
from agent_envs.core.lookup import import_path, lookup, lookup_or_import
from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.scoring import exact_match, f1
from agent_envs.scoring.math_answers import math_equal
from agent_trainers.trajectory import ROLE_NAME, Number, Reward

Program = Callable[["ProgramSession", dict[str, Any]], Any]
ScoreAnswer = Callable[[dict[str, Any], Any], Any]
RUNNERS: Final[Mapping[str, str]] = {
    "thread": "a function, in a thread of the trainer; cannot be ended, and trusted",
    "process": "a function or a command, in a process; ended by force, sees its own session only",
    "container": "a command that starts a container, such as docker run --rm -i ...",
}
"""How programs run, with a description for ``--help``."""
SEED_VARIABLE: Final = "AGENT_R1_SEED"
"""Environment variable with the episode's seed."""
INHERITED_VARIABLES: Final = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "PYTHONPATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "SYSTEMROOT", "OMP_NUM_THREADS"),
)
"""Variables that processes inherit from this one; keys and tokens are not among them."""
MAX_OUTPUT_BYTES: Final = 2**20
"""Length of an output's kept end."""
GRACE_SECONDS: Final = 10.0
"""Time between SIGTERM and SIGKILL for the command of a container."""
_POLL_SECONDS: Final = 0.02
_READ_SECONDS: Final = 1.0
"""How long pipes are read after the end, which a process that left the group may keep open."""
_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an episode."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")

    reward: Reward | Annotated[Mapping[str, Reward], pydantic.Field(min_length=1)]
    """The reward of the whole episode, shared by all roles; or one reward per role, by name."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """Metrics; ``success`` defaults to whether the reward is above 0."""
    truncated: bool = False
    """Whether a turn limit cut the episode off: a critic then estimates the value of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSession:
    """The endpoint of one episode's model."""

    base_url: str
    """The URL of the endpoint, as OpenAI's and Anthropic's clients take it."""
    key: str
    """The key of this episode."""
    seed: int
    """A seed for the program's own draws; the same whenever the episode is repeated."""

    def role(self, name: str) -> "ProgramSession":
        """Return the endpoint of a role, whose key is the session's followed by ``.name``."""
        check_role(name)
        return replace(self, key=f"{self.key.partition('.')[0]}.{name}")


def check_role(name: str) -> None:
    """Check the name of a role."""
    if ROLE_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"Invalid role name {name!r}: use a letter, then at most 63 letters, digits, '_' and "
            "'-'."
        )


def find_program(name: str) -> Program:
    """Return the function of an import path, ``"my_agent:run"``."""
    program: Program = lookup_or_import({}, name, kind="program")
    return program


def find_reward(name: str) -> ScoreAnswer:
    """Return one of `REWARDS`, or the function of an import path."""
    return lookup_or_import(REWARDS, name, kind="reward")


_OUTCOME: Final = pydantic.TypeAdapter(Outcome)


def read_outcome(value: Any) -> Outcome:
    """Validate the return value of a program or a reward function.

    It is an `Outcome`, a number, or a mapping ``{"reward": 1.0, "metrics": {...}}``.
    """
    if isinstance(value, Outcome):
        value = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    elif not isinstance(value, Mapping):
        value = {"reward": value}
    try:
        outcome = _OUTCOME.validate_python(dict(value))
    except pydantic.ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise TypeError(
            f"{reprlib.repr(value)} is no outcome ({where}: {error.errors()[0]['msg']}); a program "
            "returns a finite number, or Outcome(reward=1.0, ...). If it returns an answer, name "
            "the function that scores it with --reward."
        ) from None
    reward = outcome.reward
    total = sum(reward.values()) if isinstance(reward, Mapping) else reward
    return replace(outcome, metrics={"success": float(total > 0.0), **outcome.metrics})


def _golds(task: Mapping[str, Any]) -> list[str]:
    golds = task.get("answers", task.get("answer"))
    golds = [golds] if isinstance(golds, str | int | float) else golds
    if not isinstance(golds, list | tuple) or not golds:
        raise KeyError("the task has neither 'answer' nor 'answers', which the reward needs.")
    return [str(gold) for gold in golds]


def _score_exact_match(task: Mapping[str, Any], answer: Any) -> float:
    return exact_match(str("" if answer is None else answer), _golds(task))


def _score_f1(task: Mapping[str, Any], answer: Any) -> Outcome:
    exact = _score_exact_match(task, answer)
    overlap = f1(str("" if answer is None else answer), _golds(task))
    return Outcome(reward=overlap, metrics={"success": exact, "exact_match": exact})


def _score_math(task: Mapping[str, Any], answer: Any) -> float:
    text, question = str("" if answer is None else answer), str(task.get("question", ""))
    return float(any(math_equal(text, gold, question=question) for gold in _golds(task)))


REWARDS: Final[Mapping[str, ScoreAnswer]] = {
    "exact_match": _score_exact_match,
    "f1": _score_f1,
    "math": _score_math,
}
"""Rewards for programs that return an answer; the task holds ``answer`` or a list ``answers``."""


class ThreadRun:
    """A function in this process. It cannot be ended; the gateway closes its endpoint instead."""

    def __init__(self, program: Program, session: ProgramSession, task: dict[str, Any]) -> None:
        self._program, self._session, self._task = program, session, task

    def result(self) -> Any:
        return resolve(self._program(self._session, self._task))

    def stop(self) -> None:
        """Do nothing."""


class ProcessRun:
    """A process. All processes that it started are killed when it ends."""

    def __init__(
        self,
        command: Sequence[str],
        session: ProgramSession,
        task: dict[str, Any],
        variables: Mapping[str, str],
        grace_seconds: float = 0.0,
    ) -> None:
        self._command, self._task, self._grace_seconds = list(command), task, grace_seconds
        self._variables = {
            **variables,
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": session.base_url,
            "ANTHROPIC_API_KEY": session.key,
            SEED_VARIABLE: str(session.seed),
        }
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def result(self) -> Any:
        """Run the process and return the outcome in its last line."""
        with tempfile.TemporaryFile() as task:
            task.write(json.dumps(self._task, default=str).encode() + b"\n")
            task.seek(0)
            process = self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command,
                stdin=task,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._variables,
                start_new_session=True,
            )
        output, errors = bytearray(), bytearray()
        readers = [
            threading.Thread(target=_read, args=each, daemon=True)
            for each in ((process.stdout, output), (process.stderr, errors))
        ]
        for reader in readers:
            reader.start()
        while process.poll() is None and not self._stopped.wait(_POLL_SECONDS):
            pass
        _end(process, self._grace_seconds)
        for reader in readers:
            reader.join(_READ_SECONDS)
        if self._stopped.is_set():
            raise RolloutError("the program was ended.")
        stderr = f"The end of its standard error:\n{errors.decode('utf-8', 'replace').strip()}"
        if process.returncode:
            raise RolloutError(f"the program exited with {process.returncode}. {stderr}")
        # JSON may contain other ends of lines, such as U+2028
        last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
        try:
            return json.loads(last)
        except (ValueError, RecursionError):
            raise RolloutError(
                f"the last line of the program's output is not JSON: {last[:200]!r}. It must be "
                'its outcome, such as 1.0 or {"reward": 1.0, "metrics": {}}, or its answer, in '
                f"quotes. {stderr}"
            ) from None

    def stop(self) -> None:
        """End it; `result` raises and kills what it started."""
        self._stopped.set()
        process = self._process
        if process is not None and process.poll() is None:
            # Also signalled here, since the thread of `result` may not run until this process ends.
            with contextlib.suppress(ProcessLookupError):
                if self._grace_seconds:
                    process.terminate()
                else:
                    os.killpg(process.pid, signal.SIGKILL)


Run = ThreadRun | ProcessRun
"""One episode of a program. `result` is called once, in its own thread; `stop` in any."""


def _read(pipe: IO[bytes], tail: bytearray) -> None:
    """Read a pipe to its end, and keep the end of it in `tail`."""
    with pipe:
        while chunk := os.read(pipe.fileno(), 2**16):
            tail += chunk
            del tail[:-MAX_OUTPUT_BYTES]


def make_runner(
    kind: str, program: str | Program, variables: Sequence[str] = ()
) -> Callable[[ProgramSession, dict[str, Any]], Run]:
    """Return a function that prepares the run of one episode.

    Args:
        kind: A key of `RUNNERS`.
        program: ``my_module:my_function``, a command line, or a function, for threads.
        variables: Environment variables that a process gets besides `INHERITED_VARIABLES`.
    """
    lookup(RUNNERS, kind, kind="program runner")
    if kind == "thread" and not isinstance(program, str):
        return functools.partial(ThreadRun, program)
    name = program if isinstance(program, str) else import_path(program, kind="program")
    is_function = _FUNCTION.fullmatch(name) is not None
    if kind == "thread":
        if not is_function:
            raise ConfigurationError(
                f"--program {name!r} is not 'module:function', so it runs as a process: add "
                "--program_runner process, or container."
            )
        if variables:
            raise ConfigurationError("--program_env is for --program_runner process or container.")
        return functools.partial(ThreadRun, find_program(name))
    command = shlex.split(name)
    if is_function and kind == "process":
        find_program(name)
        command = [sys.executable, "-m", "agent_trainers.programs.program", name]
    if not command or shutil.which(command[0]) is None:
        raise ConfigurationError(f"--program {name!r}: there is no command {command[:1]}.")
    if missing := [each for each in variables if each not in os.environ]:
        raise ConfigurationError(f"--program_env {missing[0]}: there is no such variable.")
    inherited = (*INHERITED_VARIABLES, *variables)
    is_container = kind == "container"
    return functools.partial(
        ProcessRun,
        command if is_container else [*isolation_prefix(), *command],
        variables={each: os.environ[each] for each in inherited if each in os.environ},
        grace_seconds=GRACE_SECONDS if is_container else 0.0,
    )


@functools.cache
def isolation_prefix() -> tuple[str, ...]:
    """Return the words before a command that give it its own process namespace, if possible.

    In it the command sees no other process, and all its processes end with the first one.
    """
    prefix = (
        *("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child"),
        # The shell is the namespace's first process, which not all signals reach.
        *("--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"),
    )
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return prefix if tried.returncode == 0 else ()


def _end(process: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """End a process and all that it started."""
    members: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        members = [*parent.children(recursive=True), parent]
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


def main() -> None:
    """Run one episode of the function that the command line names."""
    # Its prints go to standard error, so that the outcome is the last line.
    outcome = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    session = ProgramSession(
        base_url=os.environ["OPENAI_BASE_URL"],
        key=os.environ["OPENAI_API_KEY"],
        seed=int(os.environ[SEED_VARIABLE]),
    )
    value = resolve(find_program(sys.argv[1])(session, task))
    with outcome:
        outcome.write("\n" + json.dumps(value, default=_as_json) + "\n")


def _as_json(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}  # an outcome


if __name__ == "__main__":
    main()
