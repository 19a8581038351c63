"""BM25 over passages.

The engine is our own inverted index (`agent_envs.retrieval.postings`). ``rank-bm25`` and ``bm25s``
can take its place, for comparisons: all three score by the same formula over the same words, so
they find the same passages.
"""

import functools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval.corpus import Corpus, Hit, Passage, Retriever
from agent_envs.retrieval.postings import K1, B, build_postings

STOP_WORDS: Final = frozenset(
    """
    a an and are as at be been but by did do does for from had has have he her his how in is
    it its of on or s she that the their they this to was were what when where which who
    whom whose why will with
    """.split()
)
"""Words that say nothing about what is looked for: left out of queries that hold others."""

_WORD = re.compile(r"\w+")


def build_retriever(corpus: Corpus, backend: str = "auto") -> Retriever:
    """Index a corpus.

    Args:
        corpus: What to search.
        backend: ``"bm25"``, our own engine, which ``"auto"`` means, too; ``"rank_bm25"`` or
            ``"bm25s"``: the same through the library of that name.

    Raises:
        UnknownNameError: If there is no such backend.
    """
    index = lookup(RETRIEVERS, "bm25" if backend == "auto" else backend, kind="retriever")
    documents = list(map(words_of, corpus.passages))
    if not any(documents):  # which the libraries cannot index
        index = build_postings
    return BM25Retriever(corpus.passages, index(documents))


def words_of(passage: Passage) -> list[str]:
    """Return the words by which a passage is found: those of its title and of its text."""
    return tokenize(f"{passage.title} {passage.text}")


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words of any script."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def query_words(query: str) -> list[str]:
    """Return the words that a query is looked up by: those that say something, else all."""
    words = tokenize(query)
    return [word for word in words if word not in STOP_WORDS] or words


Scores = Callable[[list[str]], npt.NDArray[np.float64]]


class BM25Retriever:
    """Finds the passages with the highest scores."""

    def __init__(self, passages: Sequence[Passage], score: Scores) -> None:
        """Search `passages` by `score`, which gives one score for each of them."""
        self._passages = passages
        self._score = score

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        words = query_words(query)
        if not words or not len(self._passages):
            return []
        return [Hit(self._passages[i], i, value) for i, value in _best(self._score(words), top_k)]


def _best(scores: npt.NDArray[np.float64], top_k: int) -> list[tuple[int, float]]:
    """Return number and score of the highest scores above 0; equal ones in order of number."""
    found = np.flatnonzero(scores)
    # Rounded, so that the last bits, which differ between the engines, decide no order.
    values = np.round(scores[found], 4)
    threshold = np.partition(values, -top_k)[-top_k] if len(found) > top_k else 0.0
    chosen = np.flatnonzero((values >= threshold) & (values > 0))
    order = chosen[np.argsort(-values[chosen], kind="stable")[:top_k]]
    return list(zip(found[order].tolist(), values[order].tolist(), strict=True))


def _rank_bm25(documents: list[list[str]]) -> Scores:
    from rank_bm25 import BM25Okapi

    class Engine(BM25Okapi):  # type: ignore[misc] # rank-bm25 is untyped
        # Okapi's weight of a word that is in half of the passages or more is not above 0, so in a
        # small corpus nothing would be found. Lucene's is, and both engines can have it.
        def _calc_idf(self, counts: Mapping[str, int]) -> None:
            self.idf = {
                word: math.log(1 + (len(documents) - count + 0.5) / (count + 0.5))
                for word, count in counts.items()
            }

    engine = Engine(documents, k1=K1, b=B)

    # A score is a sum over the words of the query; those of a group of episodes ask for the same
    # words again and again, and rank-bm25 looks at every passage for each.
    @functools.cache
    def score_word(word: str) -> npt.NDArray[np.float64]:
        return np.asarray(engine.get_scores([word]), np.float64)

    def score(words: list[str]) -> npt.NDArray[np.float64]:
        total = np.zeros(len(documents))
        for word in words:
            if word in engine.idf:
                total += score_word(word)
        return total

    return score


def _bm25s(documents: list[list[str]]) -> Scores:
    import bm25s

    # Its import sets DEBUG, and so logs each index even where the application asked for INFO.
    logging.getLogger("bm25s").setLevel(logging.NOTSET)
    engine = bm25s.BM25(method="lucene", k1=K1, b=B, dtype="float64")
    engine.index(documents, show_progress=False, create_empty_token=False)

    def score(words: list[str]) -> npt.NDArray[np.float64]:
        if not (known := [word for word in words if word in engine.vocab_dict]):
            return np.zeros(len(documents))
        # Lucene's form leaves out the factor k1 + 1, which changes no order.
        return np.asarray(engine.get_scores(known), np.float64) * (K1 + 1)

    return score


RETRIEVERS: Final[Mapping[str, Callable[[list[list[str]]], Scores]]] = {
    "bm25": build_postings,
    "rank_bm25": _rank_bm25,
    "bm25s": _bm25s,
}
