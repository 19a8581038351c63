"""Scores of short answers as SQuAD and HotpotQA define them.

The rules are those of the official evaluation scripts (Rajpurkar et al., 2016, arXiv 1606.05250;
Yang et al., 2018, arXiv 1809.09600): lower case, no ASCII punctuation, no articles, single spaces.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Final

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS: Final = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Lower the case, remove ASCII punctuation, then articles, then extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: str | Sequence[str]) -> float:
    """Return 1 if the normalised prediction equals any normalised gold answer, else 0.

    Args:
        prediction: The answer to score.
        golds: The gold answer, or several of which any is right.
    """
    normalized = normalize_answer(prediction)
    return float(any(normalized == normalize_answer(gold) for gold in _as_list(golds)))


def f1(prediction: str, golds: str | Sequence[str]) -> float:
    """Return the best F1 over words between the prediction and the gold answers, in [0, 1].

    As in HotpotQA, an answer of yes, no or noanswer scores 0 against any other answer, whatever
    words they share.

    Args:
        prediction: The answer to score.
        golds: The gold answer, or several of which any is right.
    """
    return max((_f1(prediction, gold) for gold in _as_list(golds)), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    predicted, expected = normalize_answer(prediction), normalize_answer(gold)
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return 0.0
    predicted_words, expected_words = predicted.split(), expected.split()
    num_common = (Counter(predicted_words) & Counter(expected_words)).total()
    if num_common == 0:
        return 0.0
    precision = num_common / len(predicted_words)
    recall = num_common / len(expected_words)
    return 2 * precision * recall / (precision + recall)


def _as_list(golds: str | Sequence[str]) -> Sequence[str]:
    return (golds,) if isinstance(golds, str) else golds
