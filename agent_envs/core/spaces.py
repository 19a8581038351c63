"""A Gymnasium space of Unicode text, with shared memory for `AsyncVectorEnv`."""

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, overload

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from agent_envs.errors import ActionTypeError

MAX_LENGTH: Final = 10_000_000
_LENGTH_BYTES: Final = 8
_SAMPLE_CHARACTERS: Final = np.array([chr(code) for code in range(32, 127)])


class UnicodeText(gym.Space[str]):
    """Any Unicode string of at most `max_length` characters.

    ``gymnasium.spaces.Text`` with the whole of Unicode takes seconds to build and to test. Samples
    are short and printable ASCII.
    """

    def __init__(
        self, max_length: int = MAX_LENGTH, seed: int | np.random.Generator | None = None
    ) -> None:
        """Set the maximum length, and the seed of `sample`."""
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
        """Return whether `x` is a string of at most `max_length` characters."""
        return isinstance(x, str) and len(x) <= self.max_length

    @property
    def is_np_flattenable(self) -> bool:
        """Whether text flattens to a numpy array: no."""
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


class SharedTexts(Sequence[str]):
    """One text per member of a vector environment, shared by processes through a sparse file.

    Each member has a range of the file for the longest text. Like the arrays of numeric spaces it
    is a view of what was written last; a deep copy is a tuple.
    """

    def __init__(self, num_texts: int, max_length: int) -> None:
        """Start with empty texts."""
        self._num_texts = num_texts
        self._stride = _LENGTH_BYTES + 4 * max_length  # UTF-8 takes four bytes at most
        descriptor, name = tempfile.mkstemp(prefix="agent-envs-texts-")
        os.close(descriptor)
        self._path = Path(name)
        weakref.finalize(self, _remove, self._path, os.getpid())

    def write(self, index: int, text: str) -> None:
        """Replace a text.

        Raises:
            ValueError: If it is longer than the space allows.
        """
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > self._stride - _LENGTH_BYTES:
            raise ValueError(f"A text of {len(text):,} characters is longer than its space allows.")
        with self._path.open("r+b") as file:
            file.seek(index * self._stride)
            file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def __len__(self) -> int:
        """Return the number of texts."""
        return self._num_texts

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Read a text, or several."""
        chosen = range(self._num_texts)[index]
        return self._read(chosen) if isinstance(chosen, int) else tuple(map(self._read, chosen))

    def _read(self, index: int) -> str:
        with self._path.open("rb") as file:
            file.seek(index * self._stride)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            return file.read(length).decode("utf-8", "surrogatepass")

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        """Return the texts as they are now."""
        return self[:]


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        path.unlink(missing_ok=True)


@create_shared_memory.register(UnicodeText)
def _create(space: UnicodeText, n: int = 1, ctx: Any = None) -> SharedTexts:
    return SharedTexts(n, space.max_length)


@read_from_shared_memory.register(UnicodeText)
def _read(space: UnicodeText, shared_memory: SharedTexts, n: int = 1) -> SharedTexts:
    return shared_memory


@write_to_shared_memory.register(UnicodeText)
def _write(space: UnicodeText, index: int, value: str, shared_memory: SharedTexts) -> None:
    shared_memory.write(index, value)


def check_turn(action: object, *, is_over: bool) -> None:
    """Check that `action` can be the next turn of an episode.

    Raises:
        ActionTypeError: If `action` is not a string.
        gymnasium.error.ResetNeeded: If the episode is over or none has begun.
    """
    if not isinstance(action, str):
        raise ActionTypeError(
            f"An action is the text of one model turn (str), not {type(action).__name__}."
        )
    if is_over:
        raise gym.error.ResetNeeded("The episode is over; call reset() before step().")
