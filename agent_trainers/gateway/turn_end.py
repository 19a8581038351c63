"""Where a turn ends, besides the policy's own end: token limits and stop texts."""

import bisect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent_trainers.policies.generation import Generation

Decode = Callable[[Sequence[int]], str | None]
_EXTRA_TOKENS: Final = 8
"""Tokens decoded beyond one per byte of a stop text: some tokens have no text."""


class TokenBudget:
    """Tokens that the turns of a session may still sample, shared by concurrent turns.

    Each running turn reserves its tokens so far and the next one. The policy's thread reserves
    after each token; the server's threads begin and end turns.
    """

    def __init__(self, limit: int) -> None:
        """Start with `limit` tokens."""
        self._lock = threading.Lock()
        self._left = limit
        self._reserved: dict[int, int] = {}  # by turn

    @property
    def left(self) -> int:
        """Tokens that no turn has reserved."""
        with self._lock:
            return self._left

    def begin(self, turn: int) -> None:
        """Reserve the first token of a turn; at least one must be `left`."""
        with self._lock:
            self._reserved[turn] = 1
            self._left -= 1

    def reserve(self, turn: int, num_tokens: int) -> bool:
        """Raise the reservation of a running turn to `num_tokens`; return whether it fits."""
        with self._lock:
            more = num_tokens - self._reserved.get(turn, 0)
            if more > self._left or turn not in self._reserved:
                return False
            if more > 0:
                self._reserved[turn] += more
                self._left -= more
            return True

    def end(self, turn: int, num_tokens: int) -> int:
        """End a turn of `num_tokens` tokens (0 for a cancelled one); return how many it keeps."""
        with self._lock:
            self._left += self._reserved.pop(turn, 0)
            kept = min(num_tokens, self._left)
            self._left -= kept
            return kept


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The limits of one turn, besides those of the policy."""

    decode: Decode
    """Decodes sampled tokens; returns None where the policy knows no tokens."""
    max_tokens: int | None
    """Maximum number of tokens."""
    reserve: Callable[[int], bool]
    """Reserves so many tokens for the turn; returns whether the session has them."""
    stops: tuple[str, ...] = ()
    """Texts that end it."""

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Return whether the turn ends after these tokens."""
        num_tokens = len(token_ids)
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            return True
        if not self.reserve(num_tokens + 1):
            return True
        if not self.stops:
            return False
        width = max(len(stop.encode("utf-8", "replace")) for stop in self.stops) + _EXTRA_TOKENS
        return self._find_stop(self.decode(token_ids[-width:])) is not None

    def cut(self, generation: Generation, max_tokens: int) -> tuple[Generation, str | None]:
        """Cut a turn at its end; the tokens up to there stay as sampled.

        Args:
            generation: The turn.
            max_tokens: Tokens that the session has left for it.

        Returns:
            The turn, and its text before the stop text; None where no stop text occurs.
        """
        ids = generation.completion_ids
        num_tokens = min(len(ids), max_tokens, self.max_tokens or max_tokens)
        if self.stops and self._find_stop(self.decode(ids)) is not None:
            first = bisect.bisect(
                range(1, len(ids) + 1),
                False,
                key=lambda n: self._find_stop(self.decode(ids[:n])) is not None,
            )
            num_tokens = min(num_tokens, first + 1)
        if num_tokens < len(ids):
            generation = replace(
                generation,
                completion_ids=ids[:num_tokens],
                logprobs=generation.logprobs[:num_tokens],
                text=self.decode(ids[:num_tokens]) or "",
                finish_reason="length",
            )
        place = self._find_stop(generation.text)
        if place is None:
            return generation, None
        return replace(generation, finish_reason="stop"), generation.text[:place]

    def _find_stop(self, text: str | None) -> int | None:
        """Return where the first stop text begins."""
        places = [text.find(stop) for stop in self.stops] if text else []
        return min((place for place in places if place >= 0), default=None)
