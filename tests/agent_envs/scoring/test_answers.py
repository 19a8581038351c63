from itertools import combinations

import pytest

from agent_envs import ConfigurationError
from agent_envs.scoring import (
    Overlap,
    answer_overlap,
    best_overlap,
    exact_match,
    f1,
    joint_overlap,
    normalize_answer,
    pass_at_k,
    set_match,
    set_overlap,
    squad_f1,
)
from agent_envs.scoring.answers import two_wiki_evidence, two_wiki_facts


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Beatles!", "beatles"), ("an apple a day", "apple day"),
        ("A.B.C. (band)", "abc band"), ("theatre", "theatre"), ("1,234", "1234"),
        ("well-known", "wellknown"),  # punctuation goes, it is not replaced by a space
        ("“Paris”", "“paris”"),  # only ASCII punctuation
        ("ÅNGSTRÖM", "ångström"),
        ("Cafe\u0301", "cafe\u0301"),  # Unicode forms stay as they are
        ("1963\u20131970", "1963\u20131970"),  # nor is a dash ASCII
        ("3.14", "314"), ("\tNew\u00a0York\n City ", "new york city"),
        ("Vitamin A", "vitamin"),  # a letter is taken for an article
        ("a-ha", "aha"),  # punctuation goes first, so no article is left
        ("the", ""), ("  ", ""),
    ],
)  # fmt: skip
def test_normalisation_is_the_official_one(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("prediction", "gold", "em", "hotpotqa", "squad"),
    [
        ("The Beatles", "beatles", 1, 1, 1),
        ("the Beatles band", "Beatles", 0, 2 / 3, 2 / 3),  # precision 1/2, recall 1
        ("The Red Harbor!", "red harbor film", 0, 0.8, 0.8),
        ("yes", "Yes.", 1, 1, 1), ("YES!", "yes", 1, 1, 1),
        ("yes it is", "yes", 0, 0, 0.5),  # HotpotQA: yes only equals yes
        ("no", "yes", 0, 0, 0), ("no one", "no", 0, 0, 2 / 3), ("Yes and no", "no", 0, 0, 0.5),
        ("noanswer", "no answer", 0, 0, 0),
        ("to be or not to be", "to be", 0, 0.5, 0.5),  # precision 2/6, recall 1
        ("", "Paris", 0, 0, 0), ("well known", "well-known", 0, 0, 0),
        ("1,234 people", "1234", 0, 2 / 3, 2 / 3),
        ("the", "a", 1, 0, 1),  # both empty: equal, but without a common word
    ],
)  # fmt: skip
def test_official_scores(prediction, gold, em, hotpotqa, squad):
    assert exact_match(prediction, gold) == em
    assert f1(prediction, gold) == pytest.approx(hotpotqa)
    assert answer_overlap(prediction, gold).f1 == pytest.approx(hotpotqa)
    assert squad_f1(prediction, gold) == pytest.approx(squad)


def test_the_best_of_several_gold_answers_counts():
    assert exact_match("NYC", ["New York", "NYC"]) == 1
    assert f1("York", ["New York", "Berlin"]) == pytest.approx(2 / 3)
    assert best_overlap([Overlap(0.5, 0.2), Overlap(0.1, 1.0)]) == Overlap(0.5, 1.0)
    assert exact_match("Paris", []) == f1("Paris", []) == 0


def test_facts_are_compared_as_sets():
    gold = [("A", 0), ("B", 1)]
    assert set_overlap([("A", 0), ("A", 0), ("C", 2)], gold) == Overlap(0.5, 0.5)
    assert set_overlap([], gold) == Overlap(0.0, 0.0)
    assert set_match([("B", 1), ("A", 0)], gold) == 1.0
    assert set_match([("A", 0)], gold) == 0.0
    # HotpotQA's script: joint precision 1 * 1/2, joint recall 1/2 * 1
    assert joint_overlap(Overlap(1.0, 0.5), Overlap(0.5, 1.0)) == Overlap(0.5, 0.5)
    assert Overlap(0.5, 0.5).f1 == pytest.approx(0.5)
    assert joint_overlap(Overlap(0.0, 0.0), Overlap(1.0, 1.0)).f1 == 0.0


def test_yes_and_no_have_no_overlap():
    assert answer_overlap("yes", "no") == answer_overlap("yes", "yes it is") == Overlap(0.0, 0.0)
    assert answer_overlap("yes", "yes") == Overlap(1.0, 1.0)


def test_facts_and_evidence_of_2wiki_are_counted():
    # 2 of 3 cited facts are right, and 2 of 3 gold ones are cited
    overlap, exact = two_wiki_facts([("A", 0), ("B", 1), ("C", 2)], [("a", 0), ("b", 1), ("D", 3)])
    assert (overlap.precision, overlap.recall, exact) == pytest.approx((2 / 3, 2 / 3, 0.0))
    assert two_wiki_facts([("A", 0)], [("a", 0)]) == (Overlap(1.0, 1.0), 1.0)
    assert two_wiki_facts([], [("a", 0)]) == (Overlap(0.0, 0.0), 0.0)
    # 1 of 2 written triples fits one of 3 gold ones
    gold = [[{"Ann"}, {"born in"}, {"Oslo", "Kristiania"}]] + 2 * [[{"Bo"}, {"is"}, {"old"}]]
    written = [("ann", "born in", "kristiania"), ("Ann", "born in", "Rome")]
    assert two_wiki_evidence(written, gold) == (Overlap(1 / 2, 1 / 3), 0.0)
    assert two_wiki_evidence(written[:1], gold[:1]) == (Overlap(1.0, 1.0), 1.0)
    assert two_wiki_evidence([], gold) == (Overlap(0.0, 0.0), 0.0)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 2), (4, 3, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(n, c, k):
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    for impossible in ((n, n + 1, k), (n, c, n + 1), (n, c, 0), (n, -1, k)):
        with pytest.raises(ConfigurationError):
            pass_at_k(*impossible)
