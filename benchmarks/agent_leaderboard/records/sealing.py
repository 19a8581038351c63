"""Encryption of what agents wrote about licensed tasks, with a key made of the data's own bytes.

Actions reveal much of a task's answer, and short answers could be guessed or recognised by their
frequency. So the text of an episode is encrypted with AES-SIV (RFC 5297), deterministically, with
the episode's place as associated data: equal texts in two places, or in two episodes that differ
in anything, have different ciphertexts, and text that was changed or moved does not decrypt.
Padding hides the length of short texts. Hashes of licensed tasks are keyed as well.
"""

import base64
import functools
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import DataError
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.records.reading import open_plain

MARK: Final = "sealed:"
MIN_BYTES: Final = 256
"""Texts are padded to this size, longer ones to the next power of two."""
_PURPOSE: Final = b"agent-r1 leaderboard, key of data\0"
"""Hashed before the data, so that published hashes of files do not reveal the key."""
_NONCE: Final = 16

Texts = Sequence[Sequence[str]]
"""Actions of the attempt that counts, then of each other attempt."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Encrypts and decrypts the actions of episodes; without a key, all text stays public."""

    key: bytes | None = None

    def close(self, texts: Texts, place: str) -> list[list[str]]:
        """Encrypt the actions of the episode at `place`."""
        if self.key is None:
            return [list(attempt) for attempt in texts]
        # The synthetic IV of the whole episode: each text's ciphertext depends on all of them.
        whole = json.dumps(texts).encode()
        nonce = self._cipher().encrypt(whole, [b"episode", place.encode()])[:_NONCE]
        return [
            [self._close_one(text, nonce, place, f"{i}.{j}") for j, text in enumerate(attempt)]
            for i, attempt in enumerate(texts)
        ]

    def open(self, texts: Texts, place: str) -> list[list[str]]:
        """Decrypt the actions of the episode at `place`."""
        from cryptography.exceptions import InvalidTag

        if self.key is None:
            return [list(attempt) for attempt in texts]
        try:
            opened = [
                [self._open_one(text, place, f"{i}.{j}") for j, text in enumerate(attempt)]
                for i, attempt in enumerate(texts)
            ]
        except (ValueError, InvalidTag):  # ValueError: Base64 or UTF-8
            opened = []
        if self.close(opened, place) != [list(attempt) for attempt in texts]:
            raise DataError("was not sealed with these data for this place, or was changed")
        return opened

    def digest(self, content: str) -> str:
        """Return a hash of `content`; with a key, it cannot be guessed without the data."""
        data = content.encode()
        if self.key is None:
            return hashlib.sha256(data).hexdigest()
        return hmac.digest(self.key, b"digest\0" + data, "sha256").hex()

    def _cipher(self) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV

        return AESSIV(hmac.digest(self.key or b"", b"encryption key", "sha512"))

    def _close_one(self, text: str, nonce: bytes, place: str, position: str) -> str:
        bound = [b"text", place.encode(), position.encode(), nonce]
        return MARK + base64.b64encode(nonce + self._cipher().encrypt(_pad(text), bound)).decode()

    def _open_one(self, text: str, place: str, position: str) -> str:
        content = base64.b64decode(text.removeprefix(MARK), validate=True)
        nonce, closed = content[:_NONCE], content[_NONCE:]
        bound = [b"text", place.encode(), position.encode(), nonce]
        padded: bytes = self._cipher().decrypt(closed, bound)
        return padded[4 : 4 + int.from_bytes(padded[:4], "big")].decode("utf-8", "surrogatepass")


def _pad(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    content = len(content).to_bytes(4, "big") + content
    return content.ljust(max(MIN_BYTES, 1 << (len(content) - 1).bit_length()), b"\0")


def episode_place(
    environment: EnvironmentRecord, agent: AgentRecord, *, task: str, sample: int, seed: int
) -> str:
    """Return what distinguishes an episode within a run and between runs; `task` is its hash.

    Everything that an agent acts by is included: its name alone would leave equal what a model
    wrote before and after training.
    """
    acts_by = [agent.kind, agent.model, agent.weights_sha256, agent.tool_format]
    acts_by += [agent.settings, agent.train]
    place = [environment.slug, task, sample, seed, agent.slug, *acts_by]
    return json.dumps(place, sort_keys=True)


@functools.lru_cache
def data_seal(paths: tuple[Path, ...]) -> Seal:
    """Return the seal of data files, in this order."""
    if not paths:  # the key would be public
        raise DataError("there are no data files to derive a key from")
    key = hashlib.sha256(_PURPOSE)
    for path in paths:
        with open_plain(path) as file:
            while block := file.read(1 << 20):
                key.update(block)
        key.update(b"\0end of file\0")
    return Seal(key.digest())
