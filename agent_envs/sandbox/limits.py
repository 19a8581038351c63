"""What a program may use, and what came of it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox.folder import Folder

Level: TypeAlias = Literal["strong", "container", "limits"]

Status: TypeAlias = Literal[
    "ok",
    "error",
    "timeout",
    "cpu_limit",
    "memory_limit",
    "process_limit",
    "output_limit",
    "closed",
]
"""``error``: the program failed by itself, or took what watched it along. ``process_limit``: more
processes than it may have, where the kernel could not refuse them. ``closed``: the session had
ended before the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program, or one call of a session, may use."""

    wall_seconds: float = 5.0
    """Time on the clock, from the start of the program to the end of its last process, without that
    in which it waits for a processor: a busy machine changes no verdict."""
    cpu_seconds: float = 5.0
    """Processor time of all its processes together."""
    memory_mb: int = 512
    """Memory: address space of each process, and what all of them hold together."""
    processes: int = 32
    """Processes and threads at the same time."""
    file_mb: int = 16
    """Size of one file."""
    scratch_mb: int = 64
    """Size of all files together; at the level ``limits`` nothing holds this one."""
    output_chars: int = 20_000
    """Characters of standard output, and as many of standard error."""

    @property
    def longest_seconds(self) -> float:
        """Time on the clock at most, however busy the machine is."""
        return 10 * self.wall_seconds

    def __post_init__(self) -> None:
        """Refuse limits that nothing could run under."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigurationError(f"Limits: {name} must be positive (got {value}).")
        if self.memory_mb < 32:
            raise ConfigurationError(
                f"Limits: memory_mb={self.memory_mb} is less than Python needs to start (32)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a program did, as far as it may be seen."""

    status: Status
    """How it ended."""
    exit_code: int | None
    """Its exit code, or minus the signal that ended it; None where a limit did."""
    stdout: str
    """Standard output, cut at the limit; bytes that are not UTF-8 become U+FFFD."""
    stderr: str
    """Standard error, likewise."""
    folder: Folder | None = None
    """What the scratch directory held at the end, if it was asked for; None also where it was lost
    with the program (then the status is no ``ok``), so go on with the folder before."""
    left_out: tuple[str, ...] = ()
    """What `folder` does not hold, and why; a few lines of ``path: reason``."""

    @property
    def files(self) -> dict[str, bytes]:
        """The plain files of `folder`: path -> content.

        Bytes of a path that are not UTF-8 become lone surrogates (PEP 383), so no two paths
        become one.
        """
        contents = self.folder.files() if self.folder is not None else {}
        return {path.decode(errors="surrogateescape"): data for path, data in contents.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a program passed its tests."""

    passed: bool
    """True only if the tests ran to their end and none failed."""
    reason: Literal["passed", "failed", "exited", "timeout", "limit"]
    """``exited``: the program ended before the tests did. ``limit``: it took too much."""
    message: str
    """What failed, in words; the tests' own text, so not for the eyes of the model."""
