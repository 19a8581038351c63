"""An environment's own states of the process's global random generators."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

_LOCK: Final = threading.RLock()
"""Held while the process's generators are replaced by those of one environment."""


class OwnRandom:
    """Generators for a library that draws from the global ones of `random` and NumPy."""

    def __init__(self) -> None:
        """Start without states: the first use seeds the generators, or takes the global ones."""
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def installed(self, seed: int | None = None) -> Iterator[None]:
        """Install the generators, seeded if `seed` is given, as the global ones.

        Otherwise an episode would depend on the other environments of the process. Threads take
        turns.
        """
        with _LOCK:
            others = _get_states()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)  # noqa: NPY002 - the library draws from it
            elif self._states is not None:
                _set_states(self._states)
            try:
                yield
            finally:
                self._states = _get_states()
                _set_states(others)


def _get_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - as above


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - as above
