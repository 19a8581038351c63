"""A folder as one value: its files, folders, links and rights, written as a row of records.

Runs inside (`pack`, `unpack`) and on the host (`read`, `write`): standard library only. The format
is ours because a tar file can hold neither sparse files well nor paths of any length: names stand
alone, between the records that enter and leave their folder, so the size is linear in the folder's.
Times are kept to the call: what a program has just changed bears a date that counts calls, so
that the same commands leave the same bytes, and `make` still sees what is newer.

A folder is ``MAGIC``, the date of its newest files, and records: a kind, rights, a date, a name,
and by kind ``d`` nothing (its content follows, up to a ``u``), ``f`` a size and the parts that are
not all holes, ``l`` the target, ``h`` the path of the file it is another name of, ``p`` nothing.
"""

# Names are bytes, in a current directory whose own path may be too long to be named.
# ruff: noqa: PTH101, PTH102, PTH106, PTH108, PTH115, PTH123, PTH208, PTH211

import errno
import io
import os
import stat
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

MAGIC: Final = b"folder-1"
FIRST_DATE: Final = 946_684_800
"""The date of files that no program has changed: the year 2000, in seconds since 1970."""
MAX_ENTRIES: Final = 4096
"""Files, folders and links in one folder; the strong level's scratch directory holds no more."""

_DATE: Final = struct.Struct(">q")
_HEAD: Final = struct.Struct(">cHqH")
_SIZE: Final = struct.Struct(">Q")
_PART: Final = struct.Struct(">QI")
_LENGTH: Final = struct.Struct(">H")
_PART_BYTES: Final = 1 << 20
_MAX_PATH: Final = 4000
"""Longer paths cannot be named in one system call."""


class Record(NamedTuple):
    """One entry of a folder, or (kind ``u``) the end of one."""

    kind: bytes
    mode: int = 0o644
    date: int = FIRST_DATE
    name: bytes = b""
    size: int = 0
    parts: tuple[tuple[int, bytes | memoryview], ...] = ()
    """Of a file, what is not a hole: offset and content."""
    target: bytes = b""


UP: Final = Record(b"u", 0)


def header(date: int = FIRST_DATE) -> bytes:
    """Return how a folder begins."""
    return MAGIC + _DATE.pack(date)


def date_of(data: bytes) -> int:
    """Return the date of the newest files in a folder, which may be empty."""
    return int(_DATE.unpack_from(data, len(MAGIC))[0]) if data else FIRST_DATE


def write(record: Record) -> bytes:
    """Return a record as bytes."""
    parts: list[bytes | memoryview] = [
        _HEAD.pack(record.kind, record.mode, record.date, len(record.name)),
        record.name,
    ]
    if record.kind == b"f":
        parts.append(_SIZE.pack(record.size))
        for offset, content in record.parts:
            parts += [_PART.pack(offset, len(content)), content]
        parts.append(_PART.pack(0, 0))
    elif record.kind in b"lh":
        parts += [_LENGTH.pack(len(record.target)), record.target]
    return b"".join(parts)


def read(data: bytes) -> Iterator[Record]:
    """Yield the records of a folder, without copying contents.

    Raises:
        ValueError: If `data` is no folder.
    """
    view, place, depth = memoryview(data), len(MAGIC) + _DATE.size, 0
    if data[: len(MAGIC)] != MAGIC or len(view) < place:
        raise ValueError("not a folder")
    while place < len(view):
        try:
            record, place = _read_record(view, place)
        except struct.error as error:
            raise ValueError("malformed folder") from error
        depth += {b"d": 1, b"u": -1}.get(record.kind, 0)
        if (record.kind == b"u") == _is_name(record.name) or depth < 0:
            raise ValueError("malformed folder")
        yield record
    if depth:
        raise ValueError("malformed folder")


def _read_record(view: memoryview, place: int) -> tuple[Record, int]:
    """Return the record at `place`, and where it ends."""
    kind, mode, date, length = _HEAD.unpack_from(view, place)
    name, place = _take(view, place + _HEAD.size, length)
    size, parts, target = 0, [], b""
    if kind == b"f":
        (size,) = _SIZE.unpack_from(view, place)
        place += _SIZE.size
        while True:
            offset, length = _PART.unpack_from(view, place)
            place += _PART.size + length
            if not length:
                break
            if offset + length > size or place > len(view):
                raise ValueError("malformed folder")
            parts.append((offset, view[place - length : place]))
    elif kind in (b"l", b"h"):
        (length,) = _LENGTH.unpack_from(view, place)
        target, place = _take(view, place + _LENGTH.size, length)
    elif kind not in (b"d", b"u", b"p"):
        raise ValueError("malformed folder")
    return Record(kind, mode, date, name, size, tuple(parts), target), place


def _take(view: memoryview, place: int, length: int) -> tuple[bytes, int]:
    taken = bytes(view[place : place + length])
    if len(taken) < length:
        raise ValueError("malformed folder")
    return taken, place + length


def _is_name(name: bytes) -> bool:
    return name not in (b"", b".", b"..") and b"/" not in name and b"\0" not in name


def unpack(data: bytes) -> None:
    """Make in the current directory, which is empty, what `data` holds.

    Raises:
        OSError: If there is no room for it.
        ValueError: If `data` is no folder.
    """
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    mask = os.umask(0)
    try:
        for record in _walk(data):
            if record.kind == b"d":
                os.mkdir(record.name, 0o700)
            elif record.kind != b"u":
                _make(record, root)
        entered: list[Record] = []
        for record in _walk(data):  # last, or a folder might be closed to what is linked into it
            if record.kind == b"d":
                entered.append(record)
            elif record.kind == b"u":
                folder = entered.pop()
                os.chmod(folder.name, folder.mode)
                os.utime(folder.name, (folder.date, folder.date))
    finally:
        os.umask(mask)
        os.fchdir(root)
        os.close(root)


def _walk(data: bytes) -> Iterator[Record]:
    """Yield the records, each in the current directory that it is about; ``d`` before it is."""
    for record in read(data):
        if record.kind == b"u":
            os.chdir("..")
        yield record
        if record.kind == b"d":
            os.chdir(record.name)


def _make(record: Record, root: int) -> None:
    if record.kind == b"f":
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(record.name, flags, record.mode)
        try:
            end = 0
            for offset, content in record.parts:
                end = offset + os.pwrite(descriptor, content, offset)
            if end != record.size:
                os.ftruncate(descriptor, record.size)
        finally:
            os.close(descriptor)
    elif record.kind == b"l":
        os.symlink(record.target, record.name)
    elif record.kind == b"h":
        os.link(record.target, record.name, src_dir_fd=root, follow_symlinks=False)
    else:
        os.mkfifo(record.name, record.mode)
    if record.kind in b"fp" and record.mode & ~0o777:
        os.chmod(record.name, record.mode)
    if record.kind != b"h":
        os.utime(record.name, (record.date, record.date), follow_symlinks=False)


class Packer:
    """Reads the current directory, when nobody works in it any more."""

    def __init__(self, *, date: int, started: float, max_bytes: int) -> None:
        """Prepare to read it.

        Args:
            date: What to date files that were changed after `started`.
            started: When the call began, in seconds since 1970.
            max_bytes: No more than this is read; what does not fit is left out.
        """
        self.left_out: list[str] = []
        """What is missing and why; at most a few lines."""
        self._date, self._started = date, int(started) - 1  # the kernel's clock for files lags
        self._bytes_left, self._entries_left = max_bytes, MAX_ENTRIES
        self._first_names: dict[tuple[int, int], bytes] = {}
        self._path: list[bytes] = []

    def pack(self) -> Iterator[bytes]:
        """Yield the folder in parts; the current directory is the same afterwards."""
        small: list[bytes] = []
        size = 0
        for part in self._pack():
            small.append(part)
            size += len(part)
            if size >= _PART_BYTES:
                yield b"".join(small)
                small, size = [], 0
        yield b"".join(small)

    def _pack(self) -> Iterator[bytes]:
        """Yield it in the smallest parts.

        Directories are entered one by one: their whole path may be longer than any call takes,
        and their depth greater than any stack.
        """
        yield header(self._date)
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            pending = [self._entries()]
            while pending:
                if (name := next(pending[-1], None)) is None:
                    pending.pop()
                    if pending:
                        os.chdir("..")
                        self._path.pop()
                        yield write(UP)
                    continue
                try:
                    about = os.lstat(name)
                    if stat.S_ISDIR(about.st_mode):
                        pending.append(self._enter(name, about))
                        yield self._head(b"d", name, about)
                    else:
                        yield from self._entry(name, about)
                except OSError as error:
                    self._leave_out(name, error.strerror or "error")
        finally:
            os.fchdir(root)
            os.close(root)

    def _enter(self, name: bytes, about: os.stat_result) -> Iterator[bytes]:
        if about.st_mode & 0o700 != 0o700:
            os.chmod(name, 0o700)
        os.chdir(name)
        self._path.append(name)
        return self._entries()

    def _entries(self) -> Iterator[bytes]:
        """Return the names in the current directory, sorted, as far as they are still counted."""
        names = sorted(os.listdir(b"."))
        fitting = max(0, min(len(names), self._entries_left))
        self._entries_left -= fitting
        for name in names[fitting:]:
            self._leave_out(name, f"more than {MAX_ENTRIES} entries")
        return iter(names[:fitting])

    def _entry(self, name: bytes, about: os.stat_result) -> Iterator[bytes]:
        key = (about.st_dev, about.st_ino)
        if stat.S_ISLNK(about.st_mode):
            yield self._head(b"l", name, about, target=os.readlink(name))
        elif first := self._first_names.get(key):
            yield self._head(b"h", name, about, target=first)
        elif stat.S_ISREG(about.st_mode):
            yield from self._file(name, about)
            path = b"/".join([*self._path, name])
            if about.st_nlink > 1 and len(path) <= _MAX_PATH:
                self._first_names[key] = path
        elif stat.S_ISFIFO(about.st_mode):
            yield self._head(b"p", name, about)
        else:
            self._leave_out(name, "neither file, folder, link nor pipe")

    def _file(self, name: bytes, about: os.stat_result) -> Iterator[bytes]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags)
        except PermissionError:
            os.chmod(name, 0o600)
            descriptor = os.open(name, flags)
        with open(descriptor, "rb", buffering=0) as file:
            if min(about.st_size, about.st_blocks * 512) > self._bytes_left:
                self._leave_out(name, "no room")
                return
            yield self._head(b"f", name, about)[: -_PART.size]
            try:
                yield from self._parts(file, about.st_size)
            except OSError as error:
                self._leave_out(name, f"cut: {error.strerror}")
            yield _PART.pack(0, 0)

    def _parts(self, file: io.FileIO, size: int) -> Iterator[bytes]:
        place = 0
        while (place := _next_data(file, place)) < size:
            end = min(file.seek(place, os.SEEK_HOLE), size, place + _PART_BYTES)
            file.seek(place)
            content = file.read(end - place)
            self._bytes_left -= len(content)
            if not content or self._bytes_left < 0:
                raise OSError(errno.EFBIG, "no room")
            yield _PART.pack(place, len(content)) + content
            place += len(content)

    def _head(self, kind: bytes, name: bytes, about: os.stat_result, target: bytes = b"") -> bytes:
        date = about.st_mtime_ns // 10**9
        if date >= self._started:
            date = self._date
        mode = stat.S_IMODE(about.st_mode)
        return write(Record(kind, mode, date, name, about.st_size, (), target))

    def _leave_out(self, name: bytes, reason: str) -> None:
        if len(self.left_out) < 16:
            path = b"/".join([*self._path, name])[-200:].decode(errors="backslashreplace")
            self.left_out.append(f"{path}: {reason}")
        elif len(self.left_out) == 16:
            self.left_out.append("and more")


def _next_data(file: io.FileIO, place: int) -> int:
    """Return where data begin at or after `place`; beyond any file if there are none."""
    try:
        return file.seek(place, os.SEEK_DATA)
    except OSError:  # ENXIO: there is nothing but a hole
        return 1 << 62


def remove(folder: str) -> None:
    """Remove a directory of any depth with all that is in it; follow no link, whatever it became.

    Directories below are moved up to the first level before they are emptied, so neither a path
    nor a stack grows with the depth.
    """
    try:
        top = _open_folder(folder, None)
    except NotADirectoryError:  # a program put a link or a file there
        os.unlink(folder)
        return
    try:
        pending, number = [b"."], 0
        while pending:
            name = pending.pop()
            here = _open_folder(name, top)
            try:
                for entry in os.listdir(here):
                    about = os.stat(entry, dir_fd=here, follow_symlinks=False)
                    if not stat.S_ISDIR(about.st_mode):
                        os.unlink(entry, dir_fd=here)
                        continue
                    os.close(_open_folder(entry, here))  # it must be ours to be moved
                    number += 1
                    moved = b"agent-envs-removed-%d" % number
                    os.rename(entry, moved, src_dir_fd=here, dst_dir_fd=top)
                    pending.append(moved)
            finally:
                os.close(here)
            if name != b".":
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _open_folder(name: str | bytes, parent: int | None) -> int:
    """Open a directory, and take the rights to it that the program may have taken away."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW
    place = os.open(name, os.O_PATH | flags, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{place}", stat.S_IRWXU)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(place)
