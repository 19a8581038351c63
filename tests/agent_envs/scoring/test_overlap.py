import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.scoring import (
    Overlap,
    answer_overlap,
    joint_overlap,
    set_match,
    set_overlap,
    squad_f1,
)


def test_facts_are_compared_as_sets():
    gold = [("A", 0), ("B", 1)]
    assert set_overlap([("A", 0), ("A", 0), ("C", 2)], gold) == Overlap(0.5, 0.5)
    assert set_overlap([], gold) == Overlap(0.0, 0.0)
    assert set_match([("B", 1), ("A", 0)], gold) == 1.0
    assert set_match([("A", 0)], gold) == 0.0


def test_the_joint_score_multiplies_precision_and_recall():
    # HotpotQA's script: joint precision 1 * 1/2, joint recall 1/2 * 1
    joint = joint_overlap(Overlap(1.0, 0.5), Overlap(0.5, 1.0))
    assert joint == Overlap(0.5, 0.5)
    assert joint.f1 == pytest.approx(0.5)
    assert joint_overlap(Overlap(0.0, 0.0), Overlap(1.0, 1.0)).f1 == 0.0


@pytest.mark.parametrize(
    ("prediction", "gold", "hotpotqa", "squad"),
    [
        ("yes", "yes", 1.0, 1.0),
        ("yes it is", "yes", 0.0, 0.5),
        ("no", "no one", 0.0, 2 / 3),
        ("the", "a", 0.0, 1.0),
        ("The Red Harbor!", "red harbor film", 0.8, 0.8),
        ("", "Oslo", 0.0, 0.0),
    ],
)
def test_the_tricky_cases_of_f1(prediction, gold, hotpotqa, squad):
    assert answer_overlap(prediction, gold).f1 == pytest.approx(hotpotqa)
    assert squad_f1(prediction, gold) == pytest.approx(squad)


sets = st.sets(st.integers(0, 5), max_size=5)


@given(sets, sets)
def test_scores_lie_between_0_and_1_and_swap_with_their_arguments(a, b):
    overlap, swapped = set_overlap(a, b), set_overlap(b, a)
    assert 0.0 <= overlap.f1 <= 1.0
    assert (overlap.precision, overlap.recall) == (swapped.recall, swapped.precision)
    assert (overlap.f1 == 1.0) == (set_match(a, b) == 1.0 and bool(a))
