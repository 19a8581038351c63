"""`Folder`: what a scratch directory holds, as one value that the host never unpacks.

::

    folder = Folder.of({"notes/a.txt": "text", "out/": ""})      # a path that ends in "/": a folder
    result = sandbox.run_shell("chmod +x *.sh; ln -s a b", files=folder, collect_files=True)
    result.folder.read("notes/a.txt")                            # bytes, or None: no such file
    sandbox.run_shell("ls -l", files=result.folder)              # goes on where the last one ended

A folder keeps files, empty folders, links of both kinds, pipes, modes and holes, at any depth and
under any name (bytes); it is immutable, picklable and compared by content. It is made and unpacked
inside sandboxes only, so a snapshot of it is free: keep the value. What could not be kept is named
in `Result.left_out`. The same commands leave equal folders: dates are those of the call, counted
from the year 2000 (see `agent_envs.sandbox.tree`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox import tree
from agent_envs.sandbox.tree import Record

MAX_PATH_BYTES: Final = 4000
"""What lies deeper is kept, but cannot be looked up."""
MAX_READ_BYTES: Final = 64 << 20
"""Longer files are cut when they are read: a file may be all holes."""

_KINDS: Final[Mapping[bytes, Literal["file", "folder", "link", "pipe"]]] = {
    b"f": "file",
    b"h": "file",
    b"d": "folder",
    b"l": "link",
    b"p": "pipe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a `Folder`."""

    path: bytes
    """From the folder: ``b"a/b.txt"``."""
    kind: Literal["file", "folder", "link", "pipe"]
    """A hard link is a ``file``, a symbolic one a ``link``."""
    mode: int
    """The rights: ``0o644``."""
    size: int
    """Of a file, in bytes, holes included."""
    target: bytes
    """Of a link: where it points to. Of a hard link: the first path of the same file."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What a scratch directory holds."""

    archive: bytes = tree.header()
    """Opaque; see `agent_envs.sandbox.tree`."""

    @classmethod
    def of(cls, files: Mapping[str, str | bytes] | Mapping[bytes, str | bytes]) -> Self:
        """Make a folder of plain files.

        Args:
            files: Relative path -> content; a path that ends in ``/`` is an (empty) folder.

        Raises:
            ConfigurationError: If a path leads out of the folder, or one is a file and a folder.
        """
        contents = {_split(path): content for path, content in files.items()}
        inner = {path[:i] for path in contents for i in range(1, len(path))}
        if both := inner.intersection(contents):
            path = b"/".join(min(both)).decode(errors="replace")
            raise ConfigurationError(f"files: {path!r} is both a file and a folder. Rename one.")
        records: list[Record] = []
        current: tuple[bytes, ...] = ()
        for *folder, name in sorted(contents):
            common = 0
            while common < min(len(current), len(folder)) and current[common] == folder[common]:
                common += 1
            records += [tree.UP] * (len(current) - common)
            records += [Record(b"d", 0o755, name=part) for part in folder[common:]]
            current = tuple(folder)
            if name:
                content = contents[(*current, name)]
                data = content.encode(errors="replace") if isinstance(content, str) else content
                parts = ((0, bytes(data)),) if data else ()
                records.append(Record(b"f", name=name, size=len(data), parts=parts))
        records += [tree.UP] * len(current)
        return cls(tree.header() + b"".join(map(tree.write, records)))

    def entries(self) -> Iterator[Entry]:
        """Yield what is in the folder, parents first, names sorted.

        Raises:
            ValueError: If `archive` is not what a sandbox made.
        """
        for path, record in self._records():
            yield Entry(
                path=path,
                kind=_KINDS[record.kind],
                mode=record.mode,
                size=record.size,
                target=record.target,
            )

    def read(self, path: str | bytes) -> bytes | None:
        """Return the content of a plain file; None if there is none. Links are not followed."""
        wanted = _encode(path)
        records = dict(self._records()) if wanted else {}
        return _content(records, wanted)

    def files(self) -> dict[bytes, bytes]:
        """Return path -> content of all plain files, up to `MAX_READ_BYTES` in all."""
        records, contents, left = dict(self._records()), {}, MAX_READ_BYTES
        for path, record in records.items():
            if record.kind in b"fh" and record.size <= left:
                content = _content(records, path) or b""
                left -= len(content)
                contents[path] = content
        return contents

    def is_whole(self) -> bool:
        """Return whether `archive` is what a sandbox made."""
        try:
            return all(True for _ in tree.read(self.archive))
        except ValueError:
            return False

    def _records(self) -> Iterator[tuple[bytes, Record]]:
        """Yield path and record of each entry that has a path of a usual length."""
        prefixes: list[bytes | None] = [b""]
        for record in tree.read(self.archive):
            if record.kind == b"u":
                prefixes.pop()
                continue
            path = None if prefixes[-1] is None else prefixes[-1] + record.name
            if path is not None and len(path) > MAX_PATH_BYTES:
                path = None
            if record.kind == b"d":
                prefixes.append(None if path is None else path + b"/")
            if path is not None:
                yield path, record

    def __repr__(self) -> str:
        """Tell the size only."""
        return f"Folder(<{len(self.archive)} bytes>)"


def _content(records: Mapping[bytes, Record], path: bytes) -> bytes | None:
    record = records.get(path)
    if record is not None and record.kind == b"h":
        record = records.get(record.target)
    if record is None or record.kind != b"f":
        return None
    content = bytearray(min(record.size, MAX_READ_BYTES))
    for offset, part in record.parts:
        if offset < len(content):
            part = part[: len(content) - offset]
            content[offset : offset + len(part)] = part
    return bytes(content)


def _encode(path: str | bytes) -> bytes:
    return path.encode(errors="surrogateescape") if isinstance(path, str) else path


def _split(path: str | bytes) -> tuple[bytes, ...]:
    """Return the parts of a path; the last one is empty if it names a folder."""
    try:
        encoded = _encode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    parts = [part for part in encoded.split(b"/") if part != b"."]
    names = [part for part in parts if part]
    is_outside = encoded.startswith(b"/") or b".." in parts or b"\0" in encoded
    if is_outside or not names or max(map(len, names)) > 255:
        raise ConfigurationError(
            f"files: {path!r} leads out of the scratch directory or is no path. Use a relative "
            "path, such as 'data/input.txt'."
        )
    return (*names, b"") if encoded.endswith(b"/") else tuple(names)
