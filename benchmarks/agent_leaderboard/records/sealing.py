"""Text that only who holds a data set can read: sealed with a key made of the data's own bytes.

What an agent writes about a task says much of its answer, and short answers can be guessed or told
apart by how often they occur. So what results hold of a licensed task is encrypted, an episode at a
time, and hashes of its tasks are keyed. The seal is made of the episode's whole text and of its
place (a synthetic initialisation vector with associated data, as in RFC 5297): equal texts at two
places, or in two runs that differ in anything the agent wrote, look nothing alike, results stay the
same bytes, and what was changed or moved does not open. Padding hides how long a short text is.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from agent_envs.errors import DataError
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.records.reading import open_plain

MARK: Final = "sealed:"
LEAST: Final = 256
"""Bytes that sealed text is padded to at least; longer text to the next power of two."""
_PURPOSE: Final = b"agent-r1 leaderboard, key of data\0"
"""Hashed before the data, so that no published hash of a file says anything about the key."""
_TAG: Final = 16

Texts = Sequence[Sequence[str]]
"""What was written in an episode: the actions of the attempt that counts, then of the others."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Seals and opens what was written in an episode; without a key all is public, as it is."""

    key: bytes | None = None

    def close(self, texts: Texts, place: str) -> list[list[str]]:
        """Return the texts of the episode at `place` as results hold them."""
        if self.key is None:
            return [list(attempt) for attempt in texts]
        tag = self._mac(b"seal", json.dumps([place, texts]).encode())[:_TAG]
        number = count()
        return [
            [MARK + base64.b64encode(tag + self._mask(_pad(text), tag, next(number))).decode()
             for text in attempt]
            for attempt in texts
        ]  # fmt: skip

    def open(self, texts: Texts, place: str) -> list[list[str]]:
        """Return the texts that were closed.

        Raises:
            DataError: If they were not closed with this key at this place, or changed since.
        """
        if self.key is None:
            return [list(attempt) for attempt in texts]
        number = count()
        try:
            opened = [[self._open_one(text, next(number)) for text in own] for own in texts]
        except ValueError:  # of Base64 or UTF-8
            opened = []
        if self.close(opened, place) != [list(attempt) for attempt in texts]:
            raise DataError("it is not sealed with these data for this place, or was changed")
        return opened

    def _open_one(self, text: str, number: int) -> str:
        content = base64.b64decode(text.removeprefix(MARK), validate=True)
        padded = self._mask(content[_TAG:], content[:_TAG], number)
        return padded[4 : 4 + int.from_bytes(padded[:4], "big")].decode("utf-8", "surrogatepass")

    def digest(self, content: str) -> str:
        """Return a hash of content; with a key nobody can guess from it who lacks the data."""
        data = content.encode()
        if self.key is None:
            return hashlib.sha256(data).hexdigest()
        return self._mac(b"digest", data).hex()

    def _mac(self, purpose: bytes, content: bytes) -> bytes:
        return hmac.digest(self.key or b"", purpose + b"\0" + content, "sha256")

    def _mask(self, content: bytes, tag: bytes, number: int) -> bytes:
        """Add the stream that key, tag and the text's number give: it is its own inverse."""
        size = len(content)
        stream = hashlib.shake_256(self._mac(b"mask", tag + number.to_bytes(8, "big"))).digest(size)
        mask = int.from_bytes(content, "big") ^ int.from_bytes(stream, "big")
        return mask.to_bytes(size, "big")


def _pad(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    content = len(content).to_bytes(4, "big") + content
    return content.ljust(max(LEAST, 1 << (len(content) - 1).bit_length()), b"\0")


def episode_place(
    environment: EnvironmentRecord, agent: AgentRecord, *, task: str, sample: int, seed: int
) -> str:
    """Return what sets an episode's place apart, here and in other runs; `task` is its hash.

    Of the agent that is all that it acts by: its name alone would leave equal what a model wrote
    before training and after.
    """
    acts_by = [agent.kind, agent.model, agent.weights_sha256, agent.tool_format]
    acts_by += [agent.settings, agent.train]
    place = [environment.slug, task, sample, seed, agent.slug, *acts_by]
    return json.dumps(place, sort_keys=True)


def data_seal(paths: Sequence[Path]) -> Seal:
    """Return the seal of data files, in this order.

    Raises:
        DataError: If one cannot be read, or there is none: everybody would have the key.
    """
    if not paths:
        raise DataError("there are no data files to seal text with, so it is public")
    key = hashlib.sha256(_PURPOSE)
    for path in paths:
        with open_plain(path) as file:
            while block := file.read(1 << 20):
                key.update(block)
        key.update(b"\0end of file\0")
    return Seal(key.digest())
