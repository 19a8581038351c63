"""A Gymnasium space of Unicode text."""

from typing import Any, Final

import numpy as np
from gymnasium import Space

MAX_LENGTH: Final = 10_000_000
_SAMPLE_CHARACTERS: Final = np.array([chr(code) for code in range(32, 127)])


class UnicodeText(Space[str]):
    """Any Unicode string of at most `max_length` characters.

    Not a subclass of ``gymnasium.spaces.Text``: with the whole of Unicode as its charset that
    space takes seconds to build, megabytes to print and a loop per character to test membership.

    Samples are short and printable ASCII.
    """

    def __init__(
        self, max_length: int = MAX_LENGTH, seed: int | np.random.Generator | None = None
    ) -> None:
        """Hold strings of at most `max_length` characters; `seed` is for `sample`."""
        super().__init__(dtype=str, seed=seed)
        self.max_length = max_length

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Draw 1 to 40 printable ASCII characters; masks are not supported.

        Raises:
            ValueError: If `mask` or `probability` is given.
        """
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes neither a mask nor a probability mask.")
        length = int(self.np_random.integers(1, 41))
        return "".join(self.np_random.choice(_SAMPLE_CHARACTERS, size=length))

    def contains(self, x: Any) -> bool:
        """Say whether `x` is a string of at most `max_length` characters."""
        return isinstance(x, str) and len(x) <= self.max_length

    @property
    def is_np_flattenable(self) -> bool:
        """Say that text does not flatten to a numpy array."""
        return False

    def __repr__(self) -> str:
        """Show the length cap."""
        return f"UnicodeText(max_length={self.max_length})"

    def __eq__(self, other: object) -> bool:
        """Compare by length cap."""
        return isinstance(other, UnicodeText) and self.max_length == other.max_length

    def __hash__(self) -> int:
        """Hash by length cap."""
        return hash((UnicodeText, self.max_length))
