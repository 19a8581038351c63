"""Limits of a program, and its results."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox.folder import Folder

Level: TypeAlias = Literal["strong", "gvisor", "container", "limits"]

Status: TypeAlias = Literal[
    "ok", "error", "timeout", "cpu_limit", "memory_limit", "process_limit", "output_limit", "closed"
]
"""``error``: the program failed, or ended its own supervisor. ``process_limit``: it had too many
processes and the kernel could not refuse them. ``closed``: the session had ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program, or of one call of a session."""

    wall_seconds: float = 5.0
    """Wall-clock time until the last process ends, not counting the time it waits for a processor:
    a busy machine changes no verdict."""
    cpu_seconds: float = 5.0
    """Processor time of all its processes together."""
    memory_mb: int = 512
    """Address space of each process, and memory of all processes together."""
    processes: int = 32
    """Processes and threads at the same time."""
    file_mb: int = 16
    """Size of one file."""
    scratch_mb: int = 64
    """Size of all files together; not enforced at the level ``limits``."""
    output_chars: int = 20_000
    """Characters of standard output, and as many of standard error."""

    @property
    def longest_seconds(self) -> float:
        """Wall-clock time at most, however busy the machine is."""
        return 10 * self.wall_seconds

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value, least = getattr(self, name), 32 if name == "memory_mb" else 0
            if not value > least:
                raise ConfigurationError(f"Limits: {name} must be above {least} (got {value}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a program."""

    status: Status
    """How it ended."""
    exit_code: int | None
    """Its exit code, or minus the signal that ended it; None where a limit did."""
    stdout: str
    """Standard output, cut at the limit; bytes that are not UTF-8 become U+FFFD."""
    stderr: str
    """Standard error, likewise."""
    folder: Folder | None = None
    """The scratch directory at the end, if requested; None also if it was lost together with the
    program (then the status is not ``ok``), so continue with the folder before."""
    left_out: tuple[str, ...] = ()
    """Entries that `folder` does not contain: a few lines of ``path: reason``."""

    seconds: float = field(default=0.0, compare=False)
    """Wall-clock time, that of waiting for a processor included."""
    peak_memory_mb: float = field(default=0.0, compare=False)
    """Memory of all processes together at its largest, as far as samples show it."""
    denied_calls: int | None = field(default=None, compare=False)
    """System calls that the level ``strong`` refused with EPERM, at most 1,000; None where they are
    not counted. Ordinary programs make none but for local sockets, which do not count."""

    @property
    def files(self) -> dict[str, bytes]:
        """The plain files of `folder`: path -> content."""
        contents = self.folder.contents() if self.folder else {}
        return {path: content for path, content in contents.items() if content is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict of tests on a program."""

    passed: bool
    """True only if the tests ran to their end and none failed."""
    reason: Literal["passed", "failed", "exited", "timeout", "limit"]
    """``exited``: the program ended before the tests did. ``limit``: it used too much."""
    message: str
    """Which test failed and how; it quotes the tests, so do not show it to the model."""
