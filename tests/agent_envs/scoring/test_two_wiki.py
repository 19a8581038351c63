"""Against version 1.1 of the official rule, written down once more, naively."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.scoring.answers import two_wiki_evidence, two_wiki_facts

TITLES = st.sampled_from(["Oslo", "oslo", "OSLO", "The Vik", "vik"])
FACTS = st.lists(st.tuples(TITLES, st.integers(0, 2)), max_size=5)
NAMES = st.sampled_from(["Oslo", "oslo!", "the Oslo", "Ada  Holm", "A. Holm", "Vik"])
ALIASES = st.lists(NAMES, min_size=1)
GOLD = st.tuples(ALIASES, st.sampled_from(["born in", "Born-in"]).map(lambda name: [name]), ALIASES)
TRIPLES = st.tuples(NAMES, st.sampled_from(["born in", "Born-in"]), NAMES)


def f1(precision, recall):
    return 2 * precision * recall / (precision + recall) if precision + recall else 0


def plain(text):
    return " ".join(re.sub(r"[!-/:-@\[-`{-~]", "", text.lower()).split())


@given(FACTS, FACTS)
def test_facts_are_scored_as_by_the_script(predicted, gold):
    # pairs are made unique first, and lower-cased afterwards
    cited = [(t.lower(), n) for t, n in set(predicted)]
    wanted = [(t.lower(), n) for t, n in set(gold)]
    right = [fact for fact in cited if fact in wanted]
    wrong = [fact for fact in cited if fact not in wanted]
    missed = [fact for fact in wanted if fact not in cited]
    precision = len(right) / len(right + wrong) if cited else 0
    recall = len(right) / len(right + missed) if right + missed else 0
    overlap, match = two_wiki_facts(predicted, gold)
    assert (*overlap, overlap.f1) == pytest.approx((precision, recall, f1(precision, recall)))
    assert match == (not wrong and not missed)


@given(st.lists(TRIPLES, max_size=4), st.lists(GOLD, max_size=3))
def test_evidence_is_scored_as_by_the_script(predicted, gold):
    written = {tuple(map(plain, triple)) for triple in predicted}
    wanted = [{tuple(map(plain, names)) for names in itertools.product(*each)} for each in gold]
    num_right = sum(any(triple in names for names in wanted) for triple in written)
    precision = num_right / len(written) if written else 0
    recall = num_right / len(gold) if gold else 0
    overlap, match = two_wiki_evidence(predicted, gold)
    assert (*overlap, overlap.f1) == pytest.approx((precision, recall, f1(precision, recall)))
    assert match == (num_right == len(written) == len(gold))
