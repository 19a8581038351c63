"""How many tokens the turns of a session may still hold, all together, also those side by side."""

import threading


class TokenBudget:
    """Tokens of a session; each turn under way holds those that it has and its next one.

    The policy's thread asks after each token, those of the server begin and end turns.
    """

    def __init__(self, limit: int) -> None:
        """Begin with `limit` tokens."""
        self._lock = threading.Lock()
        self._left = limit
        self._held: dict[int, int] = {}  # by turn

    @property
    def left(self) -> int:
        """Tokens that no turn holds."""
        with self._lock:
            return self._left

    def begin(self, turn: int) -> None:
        """Hold the first token of a turn; there is one `left`."""
        with self._lock:
            self._held[turn] = 1
            self._left -= 1

    def affords(self, turn: int, num_tokens: int) -> bool:
        """Hold so many tokens for a turn under way, if there are as many; return whether it can."""
        with self._lock:
            more = num_tokens - self._held.get(turn, 0)
            if more > self._left or turn not in self._held:
                return False
            if more > 0:
                self._held[turn] += more
                self._left -= more
            return True

    def end(self, turn: int, num_tokens: int) -> int:
        """End a turn of so many tokens; return how many of them may stay. 0 gives it up."""
        with self._lock:
            self._left += self._held.pop(turn, 0)
            kept = min(num_tokens, self._left)
            self._left -= kept
            return kept
