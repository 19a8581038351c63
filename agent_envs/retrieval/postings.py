"""An inverted index: which passages hold a word, and what each occurrence is worth under BM25.

``w(word, passage) = idf * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean length))`` with
``idf = log(1 + (N - n + 0.5) / (n + 0.5))`` (Robertson and Zaragoza, 2009; the inverse document
frequency is Lucene's), f the word's frequency in the passage, n the number of N passages that hold
it. All weights are computed when the index is built, so that a query only adds up a few slices.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

K1: Final = 1.5
B: Final = 0.75


class Numbering(Protocol):
    """The distinct words in order of their code points; the first has number 0."""

    def get(self, word: str, /) -> int | None:
        """Return the number of `word`; None if no passage holds it."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postings:
    """The index. Arrays may be memory-mapped; nothing is written after building."""

    words: Numbering
    """The number of each word."""
    starts: npt.NDArray[np.int64]
    """Where the postings of each word begin, and the end; shape (number of words + 1,)."""
    passages: npt.NDArray[np.int32]
    """For each posting the number of the passage, ascending within a word."""
    weights: npt.NDArray[np.float64]
    """For each posting what it adds to the score; above 0."""
    num_passages: int
    """How many passages are indexed."""

    def __call__(self, words: list[str]) -> npt.NDArray[np.float64]:
        """Return the score of each passage for the words of a query, each as often as it stands."""
        scores = np.zeros(self.num_passages)
        for word, count in Counter(words).items():  # 100 kB of one word cost no more than one
            if (number := self.words.get(word)) is not None:
                here = slice(self.starts[number], self.starts[number + 1])
                scores[self.passages[here]] += count * self.weights[here]
        return scores


def build_postings(documents: Iterable[list[str]]) -> Postings:
    """Index passages, given as lists of words; they are read once and not kept."""
    numbers: dict[str, int] = {}
    words, frequencies = array("i"), array("i")
    lengths, sizes = array("q"), array("q")
    for document in documents:
        counts = Counter(document)
        words.extend([numbers.setdefault(word, len(numbers)) for word in counts])
        frequencies.extend(counts.values())
        lengths.append(len(document))
        sizes.append(len(counts))
    ordered = sorted(numbers)
    renumber = np.empty(len(ordered), np.int32)
    met = np.array([numbers[word] for word in ordered], np.int64)  # in order of meeting them
    renumber[met] = np.arange(len(ordered), dtype=np.int32)
    columns = renumber[np.asarray(words)]
    by_word = np.argsort(columns, kind="stable")
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), np.asarray(sizes))
    spread = np.bincount(columns, minlength=len(ordered))
    passages = rows[by_word]
    return Postings(
        words=dict(zip(ordered, range(len(ordered)), strict=True)),
        starts=np.concatenate([[0], np.cumsum(spread)]).astype(np.int64),
        passages=passages,
        weights=_weigh(
            np.asarray(frequencies)[by_word].astype(np.float64),
            np.asarray(lengths).astype(np.float64),
            passages,
            spread,
        ),
        num_passages=len(lengths),
    )


def _weigh(
    frequencies: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.float64],
    passages: npt.NDArray[np.int32],
    spread: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Return the weight of each posting; `spread` is the number of passages of each word."""
    if not len(frequencies):
        return np.zeros(0)
    idf = np.log(1 + (len(lengths) - spread + 0.5) / (spread + 0.5))
    dampened = K1 * (1 - B + B * lengths / lengths.mean())
    saturated = frequencies * (K1 + 1) / (frequencies + dampened[passages])
    return np.asarray(np.repeat(idf, spread) * saturated)
