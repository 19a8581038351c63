"""Scores of short answers and of sets, as SQuAD and HotpotQA define them.

The rules are those of the official evaluation scripts (Rajpurkar et al., 2016, arXiv 1606.05250;
Yang et al., 2018, arXiv 1809.09600): lower case, no ASCII punctuation, no articles, single spaces.
If there are several gold answers, any of them is right.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Final, NamedTuple

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS: Final = ("yes", "no", "noanswer")


class Overlap(NamedTuple):
    """Precision and recall."""

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Their harmonic mean; 0 if both are 0."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total > 0 else 0.0


def normalize_answer(text: str) -> str:
    """Lower the case, remove ASCII punctuation, then articles, then extra white space."""
    return " ".join(_ARTICLES.sub(" ", _fold(text)).split())


def _fold(text: str) -> str:
    return text.lower().translate(_PUNCTUATION)


def exact_match(prediction: str, golds: str | Sequence[str]) -> float:
    """Return 1 if the normalised prediction equals any normalised gold answer, else 0."""
    return float(normalize_answer(prediction) in map(normalize_answer, _as_list(golds)))


def f1(prediction: str, golds: str | Sequence[str]) -> float:
    """Return the best F1 over words between the prediction and the gold answers, in [0, 1].

    As in HotpotQA, an answer of yes, no or noanswer scores 0 against any other answer, whatever
    words they share.
    """
    return max((answer_overlap(prediction, gold).f1 for gold in _as_list(golds)), default=0.0)


def squad_f1(prediction: str, golds: str | Sequence[str]) -> float:
    """Return the best F1 as SQuAD 2.0 and MuSiQue define it, in [0, 1].

    Unlike `f1`, yes and no are words like others, and two answers that normalise to nothing agree.
    """
    predicted = normalize_answer(prediction).split()
    best = 0.0
    for gold in _as_list(golds):
        expected = normalize_answer(gold).split()
        is_empty = not predicted or not expected
        score = _word_overlap(predicted, expected).f1
        best = max(best, float(predicted == expected) if is_empty else score)
    return best


def answer_overlap(prediction: str, gold: str) -> Overlap:
    """Return precision and recall over words, as the HotpotQA script does."""
    predicted, expected = normalize_answer(prediction), normalize_answer(gold)
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return Overlap(0.0, 0.0)
    return _word_overlap(predicted.split(), expected.split())


def _word_overlap(predicted: Sequence[str], expected: Sequence[str]) -> Overlap:
    num_common = (Counter(predicted) & Counter(expected)).total()
    return Overlap(num_common / max(1, len(predicted)), num_common / max(1, len(expected)))


def _as_list(golds: str | Sequence[str]) -> Sequence[str]:
    return (golds,) if isinstance(golds, str) else golds


def set_overlap(predicted: Collection[Hashable], gold: Collection[Hashable]) -> Overlap:
    """Return precision and recall of one set against another."""
    predicted, gold = set(predicted), set(gold)
    num_common = len(predicted & gold)
    return Overlap(num_common / max(1, len(predicted)), num_common / max(1, len(gold)))


def set_match(predicted: Collection[Hashable], gold: Collection[Hashable]) -> float:
    """Return 1 if both sets are equal, else 0."""
    return float(set(predicted) == set(gold))


def best_overlap(overlaps: Collection[Overlap]) -> Overlap:
    """Return the highest precision and the highest recall, for several gold answers."""
    return Overlap(max(o.precision for o in overlaps), max(o.recall for o in overlaps))


def joint_overlap(*parts: Overlap) -> Overlap:
    """Return the products of precisions and recalls: answer and facts, or evidence too."""
    return Overlap(
        math.prod(part.precision for part in parts), math.prod(part.recall for part in parts)
    )


def two_wiki_facts(
    predicted: Collection[tuple[str, int]], gold: Collection[tuple[str, int]]
) -> tuple[Overlap, float]:
    """Return overlap and exact match of supporting facts as 2WikiMultihopQA's script does.

    Titles count in any case; what differs in case only is counted several times
    (``2wikimultihop_evaluate_v1.1.py``, github.com/Alab-NII/2wikimultihop).
    """
    cited = [(title.lower(), sentence) for title, sentence in set(predicted)]
    wanted = [(title.lower(), sentence) for title, sentence in set(gold)]
    num_right = sum(fact in wanted for fact in cited)
    num_missing = sum(fact not in cited for fact in wanted)
    overlap = Overlap(num_right / max(1, len(cited)), num_right / max(1, num_right + num_missing))
    return overlap, float(num_right == len(cited) and not num_missing)


def two_wiki_evidence(
    predicted: Collection[Sequence[str]], gold: Collection[Sequence[Collection[str]]]
) -> tuple[Overlap, float]:
    """Return overlap and exact match of evidence as the same script does; articles stay.

    Each part of a gold triple is the names that are right. Each triple that fits some gold one
    counts, so recall is above 1 where one gold triple is written several times under aliases.
    """

    def fold(text: str) -> str:
        return " ".join(_fold(text).split())

    written = {tuple(map(fold, triple)) for triple in predicted}
    wanted = [[set(map(fold, names)) for names in triple] for triple in gold]
    num_right = sum(
        any(all(part in names for part, names in zip(triple, each, strict=True)) for each in wanted)
        for triple in written
    )
    overlap = Overlap(num_right / max(1, len(written)), num_right / max(1, len(gold)))
    return overlap, float(num_right == len(written) == len(gold))
