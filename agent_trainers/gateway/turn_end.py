"""Ends of turns besides the policy's own: token limits and stop texts."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent_trainers.policies.generation import Generation

Decode = Callable[[Sequence[int]], str | None]
_EXTRA_TOKENS: Final = 8
"""Tokens decoded beyond one per byte of a stop text: some tokens have no text."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The limits of one turn, besides those of the policy."""

    decode: Decode
    """Decodes sampled tokens; returns None where the policy knows no tokens."""
    max_tokens: int
    """Maximum number of tokens."""
    stops: tuple[str, ...] = ()
    """Texts that end it."""

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Return whether the turn ends after these tokens."""
        if len(token_ids) >= self.max_tokens or not self.stops:
            return len(token_ids) >= self.max_tokens
        width = max(len(stop.encode("utf-8", "replace")) for stop in self.stops) + _EXTRA_TOKENS
        return self._find_stop(self.decode(token_ids[-width:])) is not None

    def cut(self, generation: Generation, max_tokens: int) -> tuple[Generation, str | None]:
        """Cut a turn at its end; the tokens up to there stay as sampled."""
        ids = generation.completion_ids
        num_tokens = min(len(ids), max_tokens, self.max_tokens)
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
