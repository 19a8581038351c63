"""Reciprocal rank fusion of several retrievers."""

from collections import defaultdict
from typing import Final

from agent_envs.retrieval.corpus import Hit, Retriever, check_top_k

K: Final = 60
"""The paper's constant: the first ranks of one engine do not decide alone."""
DEPTH: Final = 100
"""Ranks that are read of each engine."""


class FusedRetriever:
    """Ranks the results of several engines by the sum of their reciprocal ranks.

    ``score(passage) = sum over engines of 1 / (K + rank)``, ranks from 1 (Cormack, Clarke and
    Büttcher, "Reciprocal rank fusion outperforms Condorcet and individual rank learning methods",
    SIGIR 2009). Scores of different engines cannot be compared; ranks can.
    """

    def __init__(self, *engines: Retriever) -> None:
        """Search with `engines`, which number the same passages in the same way."""
        self._engines = engines

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        check_top_k(top_k)
        rankings = [each.search(query, max(DEPTH, top_k)) for each in self._engines]
        scores: defaultdict[int, float] = defaultdict(float)
        passages = {hit.index: hit.passage for ranking in rankings for hit in ranking}
        for ranking in rankings:
            for rank, hit in enumerate(ranking, start=1):
                scores[hit.index] += 1 / (K + rank)
        order = sorted(scores, key=lambda index: (-scores[index], index))
        return [Hit(passages[index], index, scores[index]) for index in order[:top_k]]
