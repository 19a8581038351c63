"""A task for a shell: the folder at the beginning, and how it must be in the end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

Files = dict[str, str]
"""Path -> content."""
WORDS: Final = """
    amber birch cedar delta ember fjord grove harbor iris jade kelp lotus maple nectar olive
    pearl quartz river slate tulip umber violet willow zephyr
""".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellTask:
    """A task for a shell; records of the leaderboard hash its fields."""

    kind: str
    instruction: str
    files: Files
    """The folder at the beginning."""
    expected: Files
    """What must be there in the end, with this content."""
    commands: Sequence[str]
    """Commands that do it."""

    @property
    def absent(self) -> frozenset[str]:
        """What must be gone in the end."""
        return frozenset(self.files) - frozenset(self.expected)

    def checks(self, contents: Mapping[str, str | None]) -> list[bool]:
        """Return what holds of a folder, from coarse to fine; all of it where it is as it must be.

        One check for all that must stay as it was, one for each file that must be gone, one for
        each file that must change, and one for each line of that file.

        Args:
            contents: Path -> content of all there is; None where it is no plain file of text.
        """
        changed = {p: text for p, text in self.expected.items() if self.files.get(p) != text}
        kept = [p for p in self.expected if p not in changed]
        held = [all(contents.get(path) == self.expected[path] for path in kept)]
        held += [path not in contents for path in sorted(self.absent)]
        for path, text in changed.items():
            lines = (contents.get(path) or "").splitlines()
            held.append(contents.get(path) == text)
            held += [line in lines for line in text.splitlines()]
        return held


def make_text(rng: np.random.Generator, words: Iterable[str]) -> str:
    """Return words in any order, three a line."""
    words = [str(word) for word in rng.permutation(list(words))]
    lines = [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]
    return "".join(f"{line}\n" for line in lines)
