"""BM25: through ``rank-bm25`` for small corpora and through ``bm25s`` for large ones.

Both score by BM25 (Robertson and Zaragoza, 2009; k1 = 1.5, b = 0.75) over the same words and with
the same inverse document frequencies (Lucene's), so they find the same passages. ``rank-bm25`` is
indexed at once but looks at every passage for every query; ``bm25s`` is the other way round.
"""

import functools
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval.corpus import Corpus, Hit, Retriever

K1: Final = 1.5
B: Final = 0.75

SMALL_CORPUS: Final = 1_000
"""Up to this many passages ``"auto"`` takes ``rank_bm25``."""

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
        backend: ``"rank_bm25"``, ``"bm25s"``, or ``"auto"``: the first up to `SMALL_CORPUS`
            passages, the second above.

    Raises:
        UnknownNameError: If there is no such backend.
    """
    if backend == "auto":
        backend = "rank_bm25" if len(corpus) <= SMALL_CORPUS else "bm25s"
    index = lookup(RETRIEVERS, backend, kind="retriever")
    documents = [tokenize(f"{passage.title} {passage.text}") for passage in corpus.passages]
    if not any(documents):  # which neither engine can index
        return BM25Retriever(corpus, lambda words: np.zeros(len(documents)))
    return BM25Retriever(corpus, index(documents))


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

    def __init__(self, corpus: Corpus, score: Scores) -> None:
        """Search `corpus` by `score`, which gives one score per passage for the query's words."""
        self._corpus = corpus
        self._score = score

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        words = query_words(query)
        if not words or not len(self._corpus):
            return []
        # Rounded, so that the last bits, which differ between the engines, decide no order.
        scores = np.round(self._score(words), 4)
        passages = self._corpus.passages
        return [Hit(passages[i], i, float(scores[i])) for i in _best(scores, top_k)]


def _best(scores: npt.NDArray[np.float64], top_k: int) -> list[int]:
    """Return the numbers of the highest scores above 0; equal scores in order of number."""
    found = np.flatnonzero(scores > 0)
    if len(found) > top_k:
        threshold = np.partition(scores[found], -top_k)[-top_k]
        found = found[scores[found] >= threshold]
    order = np.argsort(-scores[found], kind="stable")[:top_k]
    best: list[int] = found[order].tolist()
    return best


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
    "rank_bm25": _rank_bm25,
    "bm25s": _bm25s,
}
