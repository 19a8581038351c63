"""Several engines over the same passages as one, by reciprocal rank fusion."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from agent_envs.errors import ConfigurationError
from agent_envs.retrieval.corpus import Hit, Retriever, search_many

K: Final = 60
"""The paper's; it keeps the first ranks of one engine from deciding alone."""
DEPTH: Final = 100
"""How far down an engine's ranks are looked at."""


class FusedRetriever:
    """Finds what its engines find, best first by the sum of their reciprocal ranks.

    ``score(passage) = sum over engines of 1 / (K + rank)``, ranks from 1 (Cormack, Clarke and
    Büttcher, "Reciprocal rank fusion outperforms Condorcet and individual rank learning methods",
    SIGIR 2009). Scores of different engines cannot be compared; ranks can.
    """

    def __init__(self, *engines: Retriever) -> None:
        """Ask `engines`, which number the same passages in the same way."""
        self._engines = engines

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        return self.search_many([query], top_k)[0]

    def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Search for each of `queries`."""
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        depth = max(DEPTH, top_k)
        found = [search_many(engine, queries, depth) for engine in self._engines]
        return [_fuse(rankings)[:top_k] for rankings in zip(*found, strict=True)]


def _fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    scores: defaultdict[int, float] = defaultdict(float)
    passages = {hit.index: hit.passage for ranking in rankings for hit in ranking}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            scores[hit.index] += 1 / (K + rank)
    order = sorted(scores, key=lambda index: (-scores[index], index))
    return [Hit(passages[index], index, scores[index]) for index in order]
