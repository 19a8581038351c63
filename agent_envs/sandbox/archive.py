"""A scratch directory as a compressed tar archive, packed and unpacked inside sandboxes.

Standard library only; `tarfile` is imported when needed, because the levels without a zygote pay
for it at every start. Dates make episodes reproducible: what a program changed gets a date that
counts commands, from the year 2000 on, so that ``make`` still sees what is newer.
"""

# Paths are plain text here: every file is touched, and pathlib is slow.
# ruff: noqa: PTH101, PTH208

import io
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import tarfile

FIRST_DATE: Final = 946_684_800
"""The date of the files that an archive begins with: the year 2000, in seconds since 1970."""
MAX_ENTRIES: Final = 4096
"""Files, directories and links in one archive; the strong level allows no more."""
MAX_PATH_BYTES: Final = 3800
"""Of a directory; a path of more than 4095 could not be opened."""
_MAX_LEFT_OUT: Final = 16
_BLOCK: Final = 4096


def open_archive(mode: Any, file: Any) -> "tarfile.TarFile":
    """Open a tar stream in the dialect that all sides use; names may be any bytes."""
    import tarfile

    class Archive(tarfile.TarFile):
        @staticmethod
        def extraction_filter(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
            return member  # tarfile.fully_trusted_filter, which Python 3.11.3 lacks

        def chown(self, tarinfo: tarfile.TarInfo, targetpath: Any, numeric_owner: bool) -> None:
            date = (tarinfo.mtime, tarinfo.mtime)  # tarfile itself dates no links
            os.utime(targetpath, date, follow_symlinks=False)

    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}
    return Archive.open(mode=mode, fileobj=file, format=tarfile.GNU_FORMAT, **options)


def unpack(data: bytes) -> int:
    """Extract an archive into the current directory; return the date of its newest file.

    The archive is our own, and the caller can write to nothing else, so links may point anywhere.
    """
    with open_archive("r:", io.BytesIO(zlib.decompress(data))) as archive:
        archive.extractall()  # noqa: S202 - see above
        date = max((int(member.mtime) for member in archive), default=FIRST_DATE)
    os.utime(".", (date, date))
    return date


def pack(date: int, since: float, max_bytes: int) -> tuple[bytes, list[str]]:
    """Return the current directory as an archive, and lines about what it does not contain.

    Args:
        date: The new date of files changed after `since`.
        since: When the program started, in seconds since 1970.
        max_bytes: Room for all files, in whole blocks and holes included.
    """
    dropped: dict[str, str] = {}
    room, num_entries = max_bytes, 0

    def keep(member: "tarfile.TarInfo") -> "tarfile.TarInfo | None":
        nonlocal room, num_entries
        num_entries += 1
        size = -(-member.size // _BLOCK) * _BLOCK
        if num_entries > MAX_ENTRIES:
            dropped[member.name] = f"more than {MAX_ENTRIES} entries"
        elif len(os.fsencode(member.name)) > MAX_PATH_BYTES:
            dropped[member.name] = "its path is too long"
        elif size > room or (member.islnk() and member.linkname in dropped):
            dropped[member.name] = "no room"
        else:
            needed = 0o700 if member.isdir() else 0o400 if member.isreg() else 0
            if member.mode & needed != needed:  # it is closed to its own user
                os.chmod(member.name, member.mode | needed)
            room -= size
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            is_new = member.mtime >= int(since) - 1  # the kernel's clock for files lags
            member.mtime = date if is_new else int(member.mtime)
            return member
        return None

    sys.setrecursionlimit(4 * MAX_PATH_BYTES)
    buffer = io.BytesIO()
    with open_archive("w", buffer) as archive:
        for name in sorted(os.listdir(".")):
            archive.add(name, filter=keep)
    lines = [
        f"{os.fsencode(path)[-200:].decode(errors='backslashreplace')}: {reason}"
        for path, reason in dropped.items()
    ]
    more = ["and more"] if len(lines) > _MAX_LEFT_OUT else []
    return zlib.compress(buffer.getbuffer(), 1), lines[:_MAX_LEFT_OUT] + more


def remove_tree(path: str) -> None:
    """Remove a directory, whatever it has become, at any depth; follow no link."""
    script = 'rm -rf -- "$1" || { [ -L "$1" ] || chmod -R u+rwX -- "$1"; rm -rf -- "$1"; }'
    quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    command = ["sh", "-c", script, "sh", path]
    os.waitpid(os.posix_spawn("/bin/sh", command, environment, file_actions=quiet), 0)
