"""The content of a scratch directory as one value, kept on disk where it is large.

Folders are unpacked only inside sandboxes. The same commands leave equal folders (see
`agent_envs.sandbox.archive`). Equal folders of a process share one file, which is removed with the
last of them, and at the end of the process.
"""

import atexit
import errno
import functools
import hashlib
import io
import os
import tempfile
import threading
import uuid
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox.archive import FIRST_DATE, MAX_PATH_BYTES, open_archive, remove_tree

SMALL_BYTES: Final = 1 << 16
"""A compressed folder of at most this size is kept in memory."""
MAX_STORED_BYTES: Final = 4 << 30
"""Bytes of the folders that one process keeps on disk."""
MAX_READ_BYTES: Final = 64 << 20


class _File:
    """An archive on disk, as long as a folder of this process refers to it."""

    def __init__(self, archive: bytes) -> None:
        """Write it.

        Raises:
            OSError: If there is no room, on disk or within `MAX_STORED_BYTES`.
        """
        self.size = len(archive)
        if sum(file.size for file in _FILES.values()) + self.size > MAX_STORED_BYTES:
            text = f"the folders of this process exceed {MAX_STORED_BYTES >> 20} MB"
            raise OSError(errno.ENOSPC, f"{text}; keep fewer snapshots")
        self.path = _own_folder(os.getpid()) / uuid.uuid4().hex
        self.path.write_bytes(archive)
        weakref.finalize(self, _remove, os.getpid(), self.path).atexit = False


_FILES: Final[weakref.WeakValueDictionary[bytes, _File]] = weakref.WeakValueDictionary()
"""Files by the digest of their content."""
_WRITING: Final = threading.Lock()


@functools.cache
def _own_folder(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="agent-envs-folders-"))
    atexit.register(_remove, process, folder)
    return folder


def _remove(process: int, path: Path) -> None:
    """Remove a file or folder, but not in a fork of the process that made it."""
    if process != os.getpid():
        return
    if path.is_dir():
        remove_tree(str(path))
    else:
        path.unlink(missing_ok=True)


class Folder:
    """The content of a scratch directory: files, empty folders, links, pipes and modes.

    It is immutable, picklable and compared by content. A large one is on disk.
    """

    __slots__ = ("_archive", "_digest")
    is_shared_by_snapshots = True

    def __init__(self, archive: bytes) -> None:
        """Keep a compressed tar archive."""
        self._digest = hashlib.blake2b(archive).digest()
        self._archive: bytes | _File = archive
        if len(archive) > SMALL_BYTES:
            with _WRITING:
                self._archive = _FILES.get(self._digest) or _File(archive)
                _FILES[self._digest] = self._archive

    @property
    def archive(self) -> bytes:
        """The compressed tar archive."""
        kept = self._archive
        return kept if isinstance(kept, bytes) else kept.path.read_bytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> tuple[type[Self], tuple[bytes]]:
        return type(self), (self.archive,)

    def __deepcopy__(self, memo: object) -> Self:
        return self

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
