"""Limits of a program, and its results: also the content of its scratch directory, as one value.

Folders are unpacked only inside sandboxes. The same commands leave equal folders (see
`agent_envs.sandbox.archive`).
"""

import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Self, TypeAlias

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox.archive import FIRST_DATE, MAX_PATH_BYTES, open_archive

Level: TypeAlias = Literal["strong", "container", "limits"]

Status: TypeAlias = Literal[
    "ok", "error", "timeout", "cpu_limit", "memory_limit", "process_limit", "output_limit", "closed"
]
"""``error``: the program failed, or ended its own supervisor. ``process_limit``: it had too many
processes and the kernel could not refuse them. ``closed``: the session had ended before."""

MAX_READ_BYTES: Final = 64 << 20


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
        """Check the values."""
        for name in self.__dataclass_fields__:
            value, least = getattr(self, name), 32 if name == "memory_mb" else 0
            if not value > least:
                raise ConfigurationError(f"Limits: {name} must be above {least} (got {value}).")


@dataclass(frozen=True, slots=True)
class Folder:
    """The content of a scratch directory: files, empty folders, links, pipes and modes.

    It is immutable, picklable and compared by content.
    """

    archive: bytes = field(repr=False)
    """A compressed tar archive."""

    @classmethod
    def of(cls, files: Mapping[str, str | bytes]) -> Self:
        """Return a folder of plain files.

        Args:
            files: Relative path -> content; a path that ends in ``/`` is an empty folder.

        Raises:
            ConfigurationError: If a path leads out of the folder, or is a file and a folder.
        """
        contents = {_checked(path): content for path, content in files.items()}
        folders = {path[:i] for path in contents for i, char in enumerate(path) if char == "/"}
        if both := folders.intersection(contents):
            raise ConfigurationError(
                f"files: {min(both)!r} is both a file and a folder. Rename one."
            )
        file = io.BytesIO()
        with open_archive("w", file) as archive:
            for path in sorted(folders | {path for path in contents if path[-1] != "/"}):
                member, content = archive.tarinfo(path), contents.get(path, b"")
                data = content.encode(errors="replace") if isinstance(content, str) else content
                member.mtime, member.size, member.mode = FIRST_DATE, len(data), 0o644
                if path in folders:
                    member.type, member.mode = b"5", 0o755
                archive.addfile(member, io.BytesIO(data))
        return cls(zlib.compress(file.getvalue(), 1))

    def contents(self) -> dict[str, bytes | None]:
        """Return path -> content of all entries; None for what is not a plain file.

        Bytes of a path that are not UTF-8 become lone surrogates (PEP 383). Files beyond
        `MAX_READ_BYTES` in all are left out.
        """
        contents: dict[str, bytes | None] = {}
        left = MAX_READ_BYTES
        data = zlib.decompressobj().decompress(self.archive, 2 * MAX_READ_BYTES)
        with open_archive("r:", io.BytesIO(data)) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() or member.islnk() else None
                content = None if file is None else file.read(left + 1)
                if content is None or len(content) <= left:
                    contents[member.name] = content
                    left -= len(content or b"")
        return contents


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
    not counted. Ordinary programs make a few: they look for sockets of the system's services."""

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


def _checked(path: str) -> str:
    """Return a path without ``.`` and doubled slashes, if it does not lead out of the folder."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    sizes = [len(name.encode(errors="surrogateescape")) for name in names]
    is_outside = path.startswith("/") or ".." in names or "\0" in path
    if is_outside or not names or max(sizes) > 255 or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"files: {path!r} leads out of the scratch directory or is no path. Use a relative "
            "path, such as 'data/input.txt'."
        )
    return "/".join(names) + "/" * path.endswith("/")
