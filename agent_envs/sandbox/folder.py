"""`Folder`: the content of a scratch directory as one value.

A folder keeps files, empty folders, links, pipes and modes; it is immutable, picklable and compared
by content. The host reads it, but unpacks it only inside sandboxes. `Result.left_out` names what
could not be kept. The same commands leave equal folders (see `agent_envs.sandbox.archive`).
"""

import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agent_envs.errors import ConfigurationError
from agent_envs.sandbox.archive import FIRST_DATE, MAX_PATH_BYTES, open_archive

MAX_READ_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Folder:
    """The content of a scratch directory."""

    archive: bytes
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

    def __repr__(self) -> str:
        """Show the size only."""
        return f"Folder(<{len(self.archive)} bytes>)"


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
