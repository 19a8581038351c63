"""A scratch directory as a compressed tar archive, packed and unpacked inside sandboxes.

Runs inside, in the supervisor: standard library only. `tarfile` is imported when it is needed,
because the levels without a zygote would pay for it at every start.

Dates make episodes reproducible: what a program changed gets a date that counts commands, from the
year 2000 on, so that the same commands leave the same bytes and ``make`` still sees what is newer.
"""

# Paths are plain text here: every file is touched, and pathlib is slow.
# ruff: noqa: PTH101, PTH118, PTH123, PTH208

import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import tarfile

FIRST_DATE: Final = 946_684_800
"""The date of the files that an archive begins with: the year 2000, in seconds since 1970."""
MAX_ENTRIES: Final = 4096
"""Files, directories and links in one archive; the strong level allows no more."""
_MAX_LEFT_OUT: Final = 16
_BLOCK: Final = 4096
MAX_PATH_BYTES: Final = 4000
"""Longer paths are left out: no system call takes them."""


def open_archive(mode: Any, file: Any) -> "tarfile.TarFile":
    """Open a tar stream in the dialect that all sides use; names may be any bytes."""
    import tarfile

    return _open(tarfile.TarFile, mode, file)


def _open(kind: "type[tarfile.TarFile]", mode: Any, file: Any) -> "tarfile.TarFile":
    from tarfile import GNU_FORMAT

    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}
    return kind.open(mode=mode, fileobj=file, format=GNU_FORMAT, **options)


def unpack(data: bytes) -> int:
    """Extract an archive into the current directory; return the date of its newest file.

    The archive is our own, and the caller can write to nothing but this directory, so links may
    point anywhere. Blocks of zeros become holes: a directory never needs more room than before.
    """
    import io
    import tarfile

    class Extracted(tarfile.TarFile):
        def makefile(self, tarinfo: tarfile.TarInfo, targetpath: Any) -> None:
            assert self.fileobj is not None  # noqa: S101 - it is open
            self.fileobj.seek(tarinfo.offset_data)
            with open(targetpath, "wb") as file:
                for start in range(0, tarinfo.size, _BLOCK):
                    block = self.fileobj.read(min(_BLOCK, tarinfo.size - start))
                    if block.count(0) == len(block):
                        file.seek(len(block), os.SEEK_CUR)
                    else:
                        file.write(block)
                file.truncate(tarinfo.size)

        def chown(self, tarinfo: tarfile.TarInfo, targetpath: Any, numeric_owner: bool) -> None:
            date = (tarinfo.mtime, tarinfo.mtime)  # `utime` is not called for links
            os.utime(targetpath, date, follow_symlinks=False)

    Extracted.extraction_filter = staticmethod(lambda member, _: member)
    raw = io.BytesIO(zlib.decompress(data))
    with _open(Extracted, "r:", raw) as archive:
        archive.extractall()  # noqa: S202 - see above
        date = max((int(member.mtime) for member in archive), default=FIRST_DATE)
    os.utime(".", (date, date))
    return date


class Packer:
    """Packs the current directory when no process works in it any more."""

    def __init__(self, send: Callable[[bytes], None], date: int, since: float) -> None:
        """Prepare to pack.

        Args:
            send: Gets the archive in parts.
            date: The new date of files changed after `since`.
            since: When the program started, in seconds since 1970.
        """
        self.left_out: list[str] = []
        """Missing entries, with the reason; at most a few lines."""
        self._send, self._date = send, date
        self._since = int(since) - 1  # the kernel's clock for files lags
        self._compressor = zlib.compressobj(1)

    def write(self, data: bytes) -> int:
        """Compress and send a part of the tar stream."""
        if part := self._compressor.compress(data):
            self._send(part)
        return len(data)

    def pack(self, max_bytes: int) -> None:
        """Pack files of at most `max_bytes` in all, holes included."""
        num_entries, inodes = 0, set[tuple[int, int]]()
        with open_archive("w|", self) as archive:
            for path in _walk(self._leave_out):
                num_entries += 1
                about = os.lstat(path)
                is_new = stat.S_ISREG(about.st_mode) and (about.st_dev, about.st_ino) not in inodes
                if num_entries > MAX_ENTRIES:
                    self._leave_out(path, f"more than {MAX_ENTRIES} entries")
                elif is_new and about.st_size > max_bytes:
                    self._leave_out(path, "no room")
                elif (member := archive.gettarinfo(path)) is None:
                    self._leave_out(path, "neither file, directory, link nor pipe")
                else:
                    if is_new:
                        inodes.add((about.st_dev, about.st_ino))
                        max_bytes -= about.st_size
                    self._add(archive, member, path)
        self._send(self._compressor.flush())

    def _add(self, archive: "tarfile.TarFile", member: "tarfile.TarInfo", path: str) -> None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = self._date if member.mtime >= self._since else int(member.mtime)
        if not member.isreg():
            archive.addfile(member)
            return
        if not member.mode & stat.S_IRUSR:
            os.chmod(path, member.mode | stat.S_IRUSR)
        with open(path, "rb") as file:
            archive.addfile(member, file)

    def _leave_out(self, path: str, reason: str) -> None:
        if len(self.left_out) < _MAX_LEFT_OUT:
            shown = os.fsencode(path)[-200:].decode(errors="backslashreplace")
            self.left_out.append(f"{shown}: {reason}")
        elif len(self.left_out) == _MAX_LEFT_OUT:
            self.left_out.append("and more")


def _walk(leave_out: Callable[[str, str], None]) -> Iterator[str]:
    """Yield all paths below the current directory, sorted, directories before their content.

    A directory may be closed to its own user, and as deep as a path can be long. It is opened when
    the caller has seen its rights.
    """
    pending = [""]
    while pending:
        path = pending.pop()
        try:
            if len(os.fsencode(path)) > MAX_PATH_BYTES:
                leave_out(path, "its path is too long")
                continue
            if path:
                about = os.lstat(path)
                yield path
                if not stat.S_ISDIR(about.st_mode):
                    continue
                if about.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                    os.chmod(path, stat.S_IRWXU)
            names = sorted(os.listdir(path or "."), reverse=True)
            pending += [os.path.join(path, name) for name in names]
        except OSError as error:
            leave_out(path, error.strerror or "error")


def remove_tree(path: str) -> None:
    """Remove a directory, whatever it has become, at any depth; follow no link."""
    script = 'rm -rf -- "$1" || { [ -L "$1" ] || chmod -R u+rwX -- "$1"; rm -rf -- "$1"; }'
    quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    command = ["sh", "-c", script, "sh", path]
    os.waitpid(os.posix_spawn("/bin/sh", command, environment, file_actions=quiet), 0)
