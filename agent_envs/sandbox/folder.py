"""The content of a scratch directory as one value, kept on disk where it is large.

Folders are unpacked only inside sandboxes. The same commands leave equal folders (see
`agent_envs.sandbox.archive`). Equal folders of a process share one file, which is removed with the
last of them, and at the end of the process.
"""

import atexit
import errno
import hashlib
import io
import os
import tempfile
import threading
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


class _Store:
    """Files with the archives of folders, as long as a folder of this process refers to them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in a thread that holds it
        self._files: dict[bytes, tuple[Path, int]] = {}
        self._counts: dict[bytes, int] = {}
        self._folder: tuple[int, Path] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self._files.values())

    def keep(self, owner: object, digest: bytes, archive: bytes) -> None:
        """Keep an archive on disk until its `owner` is gone.

        Raises:
            OSError: If there is no room, on disk or within `MAX_STORED_BYTES`.
        """
        with self._lock:
            if digest not in self._files:
                if self.num_bytes + len(archive) > MAX_STORED_BYTES:
                    text = f"the folders of this process exceed {MAX_STORED_BYTES >> 20} MB"
                    raise OSError(errno.ENOSPC, f"{text}; keep fewer snapshots")
                path = self._own_folder() / digest.hex()[:32]
                path.write_bytes(archive)
                self._files[digest] = path, len(archive)
            self._counts[digest] = self._counts.get(digest, 0) + 1
            weakref.finalize(owner, self._release, digest).atexit = False

    def read(self, digest: bytes) -> bytes:
        """Return an archive."""
        return self._files[digest][0].read_bytes()

    def _release(self, digest: bytes) -> None:
        with self._lock:
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest]
                path, _ = self._files.pop(digest)
                if path.parent == self._own_folder():  # else the file of the process we are from
                    path.unlink(missing_ok=True)

    def _own_folder(self) -> Path:
        process = os.getpid()
        if self._folder is None or self._folder[0] != process:
            self._folder = process, Path(tempfile.mkdtemp(prefix="agent-envs-folders-"))
            atexit.register(self._remove, *self._folder)
        return self._folder[1]

    @staticmethod
    def _remove(process: int, folder: Path) -> None:
        if process == os.getpid():
            remove_tree(str(folder))


_STORE: Final = _Store()


class Folder:
    """The content of a scratch directory: files, empty folders, links, pipes and modes.

    It is immutable, picklable and compared by content. A large one is on disk.
    """

    __slots__ = ("__weakref__", "_archive", "_digest")
    is_shared_by_snapshots = True

    def __init__(self, archive: bytes) -> None:
        """Keep a compressed tar archive."""
        self._digest = hashlib.blake2b(archive).digest()
        self._archive = archive if len(archive) <= SMALL_BYTES else None
        if self._archive is None:
            _STORE.keep(self, self._digest, archive)

    @property
    def archive(self) -> bytes:
        """The compressed tar archive."""
        return _STORE.read(self._digest) if self._archive is None else self._archive

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
