"""MuSiQue-Full's scores of pairs: a question and its unanswerable twin.

As in the official ``evaluate_v1.0.py`` (github.com/StonyBrookNLP/musique): the score of the
answerable member counts only if the sufficiency of both members is judged correctly.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from agent_envs.errors import DataError

UNANSWERABLE_SUFFIX = "-unanswerable"
"""Suffix of the task id of an unanswerable twin, after the id of the question."""
_SCORES = {
    "group_answer_sufficiency_em": "exact_match",
    "group_answer_sufficiency_f1": "f1",
    "group_support_sufficiency_f1": "support_f1",
}


def musique_group_scores(episodes: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return the official group scores of episodes of ``MuSiQue-v0`` with ``unanswerable=True``.

    Args:
        episodes: Task id and metrics of each episode; of both members of every pair, once or
            several times (then each episode of a member is paired with each of its twin).

    Returns:
        ``group_answer_sufficiency_f1`` and ``_em``, and, where facts were cited in notes,
        ``group_support_sufficiency_f1``; means over pairs, in [0, 1].

    Raises:
        DataError: If a pair lacks a member.
    """
    pairs: dict[str, dict[bool, list[Mapping[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for task_id, metrics in episodes:
        question = task_id.removesuffix(UNANSWERABLE_SUFFIX)
        pairs[question][question == task_id].append(metrics)
    if not pairs or any(len(members) < 2 for members in pairs.values()):
        raise DataError("The group scores need episodes of both members of each pair.")
    return {
        name: sum(_pair_score(members, metric) for members in pairs.values()) / len(pairs)
        for name, metric in _SCORES.items()
        if all(metric in episode for members in pairs.values() for episode in members[True])
    }


def _pair_score(members: Mapping[bool, list[Mapping[str, float]]], metric: str) -> float:
    earned = [episode[metric] * episode["sufficiency"] for episode in members[True]]
    refused = [episode["sufficiency"] for episode in members[False]]
    return sum(earned) / len(earned) * sum(refused) / len(refused)
