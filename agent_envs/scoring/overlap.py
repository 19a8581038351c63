"""Precision and recall, of sets and jointly over several of them.

As in the official evaluation script of HotpotQA (Yang et al., 2018, arXiv 1809.09600); that of
2WikiMultihopQA has its own rules (`agent_envs.scoring.two_wiki`).
"""

import math
from collections.abc import Collection, Hashable
from typing import NamedTuple


class Overlap(NamedTuple):
    """How much two things share."""

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Their harmonic mean; 0 if both are 0."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total > 0 else 0.0


def set_overlap(predicted: Collection[Hashable], gold: Collection[Hashable]) -> Overlap:
    """Return precision and recall of one set against another, repetitions not counted."""
    predicted, gold = set(predicted), set(gold)
    num_common = len(predicted & gold)
    return Overlap(num_common / max(1, len(predicted)), num_common / max(1, len(gold)))


def set_match(predicted: Collection[Hashable], gold: Collection[Hashable]) -> float:
    """Return 1 if both sets are equal, else 0."""
    return float(set(predicted) == set(gold))


def best_overlap(overlaps: Collection[Overlap]) -> Overlap:
    """Return the highest precision and the highest recall, as against several gold answers."""
    return Overlap(max(o.precision for o in overlaps), max(o.recall for o in overlaps))


def joint_overlap(*parts: Overlap) -> Overlap:
    """Return the products of precisions and recalls: answer and facts, or evidence too."""
    return Overlap(
        math.prod(part.precision for part in parts), math.prod(part.recall for part in parts)
    )
