"""BM25 over passages, with an inverted index or with the library ``rank-bm25``.

``w(word, passage) = idf * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean length))`` with
``idf = log(1 + (N - n + 0.5) / (n + 0.5))`` (Robertson and Zaragoza, 2009; the inverse document
frequency is Lucene's), f the word's frequency in the passage, n the number of N passages that
contain it. The index stores all weights, so a query only adds up a few slices.
"""

import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import lookup
from agent_envs.retrieval.corpus import Corpus, Hit, Passage, Retriever

K1: Final = 1.5
B: Final = 0.75
STOP_WORDS: Final = frozenset(
    """
    a an and are as at be been but by did do does for from had has have he her his how in is
    it its of on or s she that the their they this to was were what when where which who
    whom whose why will with
    """.split()
)
"""Words without information, removed from queries that contain others."""

RETRIEVERS: Final = ("auto", "bm25", "rank_bm25")
_WORD = re.compile(r"\w+")


def build_retriever(corpus: Corpus, backend: str = "auto") -> Retriever:
    """Index a corpus by the inverted index ``"bm25"`` (also ``"auto"``), or by ``"rank_bm25"``."""
    lookup(dict.fromkeys(RETRIEVERS), backend, kind="retriever")
    retriever = RankBM25Retriever if backend == "rank_bm25" else BM25Retriever
    return retriever(corpus.passages, build_postings(map(words_of, corpus.passages)))


def words_of(passage: Passage) -> list[str]:
    """Return the indexed words of a passage: those of its title and text."""
    return tokenize(f"{passage.title} {passage.text}")


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words of any script."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def query_words(query: str) -> list[str]:
    """Return the words of a query without stop words; all words if there are no others."""
    words = tokenize(query)
    return [word for word in words if word not in STOP_WORDS] or words


@dataclass(frozen=True, slots=True, kw_only=True)
class Postings:
    """An inverted index, read only; the arrays may be memory-mapped."""

    words: Iterable[str]
    """The distinct words in order of their code points; left out of a saved index."""
    number: Callable[[str], int | None]
    """Returns the place of a word in this order; None if no passage contains it."""
    starts: npt.NDArray[np.int64]
    """Start of the postings of each word, and the end; shape (number of words + 1,)."""
    passages: npt.NDArray[np.int32]
    """The passage of each posting, ascending within a word."""
    weights: npt.NDArray[np.float64]
    """The score that each posting adds; above 0."""


class BM25Retriever:
    """Finds the passages with the highest scores."""

    def __init__(self, passages: Sequence[Passage], postings: Postings) -> None:
        self.passages, self._postings = passages, postings

    def search(self, query: str, top_k: int) -> list[Hit]:
        scores = self._scores(query_words(query))
        found = np.flatnonzero(scores)
        # Rounded: the order of additions must not decide the order of passages.
        values = np.round(scores[found], 4)
        threshold = np.partition(values, -top_k)[-top_k] if len(found) > top_k else 0.0
        chosen = np.flatnonzero((values >= threshold) & (values > 0))
        order = chosen[np.argsort(-values[chosen], kind="stable")[:top_k]]
        best = zip(found[order].tolist(), values[order].tolist(), strict=True)
        return [Hit(self.passages[i], i, value) for i, value in best]

    def _scores(self, words: Iterable[str]) -> npt.NDArray[np.float64]:
        """Return the score of each passage; repeated words count."""
        index, scores = self._postings, np.zeros(len(self.passages))
        for word, count in Counter(words).items():  # 100 kB of one word cost no more than one
            if (number := index.number(word)) is not None:
                postings = slice(index.starts[number], index.starts[number + 1])
                scores[index.passages[postings]] += count * index.weights[postings]
        return scores


class RankBM25Retriever(BM25Retriever):
    """Finds the same passages with the library."""

    def _scores(self, words: Iterable[str]) -> npt.NDArray[np.float64]:
        if not len(self._postings.weights):  # the library cannot index an empty corpus
            return np.zeros(len(self.passages))
        return np.asarray(self._engine.get_scores(list(words)), np.float64)

    @cached_property
    def _engine(self) -> Any:
        from rank_bm25 import BM25Okapi

        engine = BM25Okapi(list(map(words_of, self.passages)), k1=K1, b=B)
        # Okapi's weight of a word in half of the passages is 0: a small corpus would find nothing.
        num_containing = np.diff(self._postings.starts)
        idf = np.log(1 + (len(self.passages) - num_containing + 0.5) / (num_containing + 0.5))
        engine.idf = dict(zip(self._postings.words, idf.tolist(), strict=True))
        return engine


def build_postings(documents: Iterable[list[str]]) -> Postings:
    """Index passages, given as lists of words, which are read once and not kept."""
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    words, lengths = array("i"), array("q")
    for document in documents:
        words.extend(map(numbers.__getitem__, document))
        lengths.append(len(document))
    ordered = sorted(numbers)
    renumber = np.argsort([numbers[word] for word in ordered])  # the inverse of the order
    places = np.repeat(np.arange(len(lengths)), np.asarray(lengths))
    pairs, frequencies = np.unique(
        renumber[np.asarray(words)] * len(lengths) + places, return_counts=True
    )
    columns, rows = np.divmod(pairs, max(1, len(lengths)))
    num_containing = np.bincount(columns, minlength=len(ordered))  # passages of each word
    passages, weights = rows.astype(np.int32), np.zeros(0)
    if len(passages):
        size = np.asarray(lengths).astype(np.float64)
        idf = np.log(1 + (len(size) - num_containing + 0.5) / (num_containing + 0.5))
        dampened = K1 * (1 - B + B * size / size.mean())
        saturated = frequencies * (K1 + 1) / (frequencies + dampened[passages])
        weights = np.asarray(np.repeat(idf, num_containing) * saturated)
    return Postings(
        words=ordered, number=dict(zip(ordered, range(len(ordered)), strict=True)).get,
        starts=np.concatenate([[0], np.cumsum(num_containing)]).astype(np.int64),
        passages=passages, weights=weights,
    )  # fmt: skip
