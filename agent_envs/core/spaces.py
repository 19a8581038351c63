"""A Gymnasium space of Unicode text."""

from typing import Any, Final

import gymnasium as gym
import numpy as np

MAX_LENGTH: Final = 10_000_000
_SAMPLE_CHARACTERS: Final = np.array([chr(code) for code in range(32, 127)])


class UnicodeText(gym.Space[str]):
    """Any Unicode string of at most `MAX_LENGTH` characters.

    ``gymnasium.spaces.Text`` with the whole of Unicode takes seconds to build and to test. Samples
    are 1 to 40 characters of printable ASCII.
    """

    is_np_flattenable = False

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(dtype=str, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Draw a text; masks are not supported."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes neither a mask nor a probability mask.")
        length = int(self.np_random.integers(1, 41))
        return "".join(self.np_random.choice(_SAMPLE_CHARACTERS, size=length))

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a string of at most `MAX_LENGTH` characters."""
        return isinstance(x, str) and len(x) <= MAX_LENGTH

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)

    __hash__ = gym.Space.__hash__
