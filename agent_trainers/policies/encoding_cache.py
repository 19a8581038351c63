"""Texts that were encoded lately, with their tokens: as many as fit into so much memory."""

import sys
import threading
from collections.abc import Callable, Hashable
from typing import Final, Generic, Self, TypeVar

_TOKEN_BYTES: Final = 36
"""What a token takes in a list: a number, and where it is."""

Tokens = TypeVar("Tokens", bound=list[int] | None)


class EncodingCache(Generic[Tokens]):
    """Calls `encode` for what it does not know; forgets first what nobody has asked for longest.

    Any thread may use it. Whoever gets tokens leaves them as they are.
    """

    def __init__(self, encode: Callable[..., Tokens], max_bytes: int) -> None:
        """Keep `max_bytes` of texts and tokens, about."""
        self._encode, self._room = encode, max_bytes
        self._kept: dict[Hashable, tuple[Tokens, int]] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself, as caches of functools do: whoever is copied may share what is known."""
        return self

    def __call__(self, text: str, *more: Hashable) -> Tokens:
        """Return what `encode` does for a text and what else it is given."""
        key = (text, *more)
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self._kept[key] = known  # as the newest
                return known[0]
        ids = self._encode(text, *more)
        size = sys.getsizeof(text) + _TOKEN_BYTES * (0 if ids is None else len(ids))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ids, size
                self._room -= size
            while self._room < 0:
                self._room += self._kept.pop(next(iter(self._kept)))[1]
        return ids
