"""Text that only who holds a data set can read: sealed with a key made of the data's own bytes.

What an agent writes about a task says much of its answer, and short answers can be guessed: a plain
hash of "yes" is no secret. So what results hold of a licensed task is encrypted, and hashes of its
tasks are keyed. The same text always gives the same seal (a synthetic initialisation vector, as in
RFC 5297), so results stay the same bytes, and a seal that was changed does not open. Padding hides
how long a short answer is.
"""

import base64
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_envs.errors import DataError
from agent_leaderboard.records.reading import open_plain

MARK: Final = "sealed:"
BLOCK: Final = 128
"""Bytes that sealed text is padded to a multiple of."""
_PURPOSE: Final = b"agent-r1 leaderboard, key of data\0"
"""Hashed before the data, so that no published hash of a file says anything about the key."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Seals and opens text; without a key all is public, and text stays as it is."""

    key: bytes | None = None

    def close(self, text: str) -> str:
        """Return text as results hold it."""
        if self.key is None:
            return text
        content = text.encode("utf-8", "surrogatepass")
        padded = len(content).to_bytes(4, "big") + content
        padded += bytes(-len(padded) % BLOCK)
        tag = self._tag(padded)
        return MARK + base64.b64encode(tag + self._mask(padded, tag)).decode()

    def open(self, text: str) -> str:
        """Return the text that was closed.

        Raises:
            DataError: If it was not closed with this key, or was changed since.
        """
        if self.key is None:
            return text
        try:
            content = base64.b64decode(text.removeprefix(MARK), validate=True)
        except ValueError:
            content = b""
        tag, masked = content[:16], content[16:]
        padded = self._mask(masked, tag)
        if not text.startswith(MARK) or not hmac.compare_digest(tag, self._tag(padded)):
            raise DataError("it is not sealed with these data, or was changed")
        size = int.from_bytes(padded[:4], "big")
        return padded[4 : 4 + size].decode("utf-8", "surrogatepass")

    def digest(self, content: str) -> str:
        """Return a hash of content; with a key nobody can guess from it who lacks the data."""
        data = content.encode()
        if self.key is None:
            return hashlib.sha256(data).hexdigest()
        return hmac.digest(self.key, b"digest\0" + data, "sha256").hex()

    def _tag(self, padded: bytes) -> bytes:
        return hmac.digest(self.key or b"", b"seal\0" + padded, "sha256")[:16]

    def _mask(self, content: bytes, tag: bytes) -> bytes:
        """Add the stream that key and tag give: it is its own inverse."""
        stream = hashlib.shake_256(hmac.digest(self.key or b"", b"mask\0" + tag, "sha256"))
        size = len(content)
        mask = int.from_bytes(stream.digest(size), "big")
        return (int.from_bytes(content, "big") ^ mask).to_bytes(size, "big")


def data_seal(paths: Sequence[Path]) -> Seal:
    """Return the seal of data files, in this order.

    Raises:
        DataError: If one cannot be read.
    """
    key = hashlib.sha256(_PURPOSE)
    for path in paths:
        with open_plain(path) as file:
            while block := file.read(1 << 20):
                key.update(block)
        key.update(b"\0end of file\0")
    return Seal(key.digest())
