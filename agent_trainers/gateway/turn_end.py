"""Where a turn ends for its caller: after so many tokens, or at one of some texts."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent_trainers.policies.generation import Generation

Decode = Callable[[Sequence[int]], str | None]
_MORE_TOKENS: Final = 8
"""Tokens beside those of a text's own bytes that are looked at: some are no text."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a caller said about the end of a turn, beside the policy's own."""

    decode: Decode
    """Turns sampled tokens into text; None where the policy knows no tokens."""
    max_tokens: int | None
    """Tokens of the turn, at most."""
    affords: Callable[[int], bool]
    """Says whether its session has tokens for as many in this turn."""
    stops: tuple[str, ...] = ()
    """Texts that end it."""

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Say after each token whether the turn ends with it: a policy may sample no further."""
        num_tokens = len(token_ids)
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            return True
        if not self.affords(num_tokens + 1):
            return True
        if not self.stops:
            return False
        width = max(len(stop.encode("utf-8", "replace")) for stop in self.stops) + _MORE_TOKENS
        return self._place(self.decode(token_ids[-width:])) is not None

    def cut(self, generation: Generation, max_tokens: int) -> tuple[Generation, str | None]:
        """End a turn where it was to end; its tokens stay as they were sampled, up to there.

        Args:
            generation: The turn.
            max_tokens: What its session has left for it.

        Returns:
            The turn, and its text up to the text that ended it; None where none did.
        """
        ids = generation.completion_ids
        num_tokens = min(len(ids), max_tokens, self.max_tokens or max_tokens)
        if self.stops and self._place(self.decode(ids)) is not None:
            ends = range(1, len(ids) + 1)
            first = bisect.bisect(
                ends, False, key=lambda n: self._place(self.decode(ids[:n])) is not None
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
        place = self._place(generation.text)
        if place is None:
            return generation, None
        return replace(generation, finish_reason="stop"), generation.text[:place]

    def _place(self, text: str | None) -> int | None:
        """Return where the first of the texts begins."""
        places = [text.find(stop) for stop in self.stops] if text else []
        return min((place for place in places if place >= 0), default=None)
