import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import DataError, UnknownNameError
from agent_envs.retrieval import (
    RETRIEVERS,
    Corpus,
    Passage,
    build_retriever,
    load_passages,
    query_words,
)

PASSAGES = [
    Passage("Oslo", "Oslo is the capital of Norway."),
    Passage("Bergen", "Bergen is a city in Norway."),
    Passage("Porto", "Porto is a city in Portugal."),
    Passage("Café", "A café serves coffee."),
    Passage("Riga", "Riga is the capital of Latvia."),
]


def titles(hits):
    return [hit.passage.title for hit in hits]


@pytest.mark.parametrize(
    ("query", "top_k", "expected"),
    [
        ("capital of Norway", 1, ["Oslo"]),
        ("CAFE\u0301", 1, ["Café"]),
        ("who were they", 1, ["The Who"]),  # only stop words
        ("city norway", 50, ["Bergen", "Oslo", "Porto"]),
        ("xylophone ?!", 3, []),
    ],
)
@pytest.mark.parametrize("backend", RETRIEVERS)
def test_a_query_finds_the_best_passages(query, top_k, expected, backend):
    corpus = Corpus([*PASSAGES, Passage("The Who", "They were who they were.")])
    hits = build_retriever(corpus, backend).search(query, top_k)
    assert titles(hits) == expected


def test_equal_passages_are_ordered_by_number():
    # Two interleaved kinds of 25: a sort that is not stable would keep the order of a few.
    texts = ["same words here", "same same here"] * 25
    twins = [Passage(f"t{i}", text) for i, text in enumerate(texts)]
    twins += [Passage(f"u{i}", "something else entirely") for i in range(100)]
    expected = [f"t{i}" for i in [*range(1, 50, 2), *range(0, 50, 2)]]
    assert titles(build_retriever(Corpus(twins)).search("same", 30)) == expected[:30]


def test_tiny_and_empty_corpora_are_searched():
    for size in (1, 2):
        retriever = build_retriever(Corpus(PASSAGES[:size]))
        for passage in PASSAGES[:size]:
            assert titles(retriever.search(passage.title, 1)) == [passage.title]
    for passages in ([], [Passage("", "?")]):
        for backend in RETRIEVERS:
            assert build_retriever(Corpus(passages), backend).search("x", 1) == []
    with pytest.raises(UnknownNameError, match="Did you mean 'bm25'"):
        build_retriever(Corpus(PASSAGES), "bm25x")


WORDS = st.sampled_from("red blue green harbor film star city old new the of".split())
TEXTS = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)


@given(st.lists(TEXTS, max_size=20), TEXTS, st.integers(1, 25))
def test_scores_are_those_of_the_formula(texts, query, top_k):
    documents = [[str(i), *text.split()] for i, text in enumerate(texts)]
    mean = sum(map(len, documents)) / max(1, len(documents))

    def score(document):
        total = 0.0
        for word in query_words(query):
            containing, count = sum(word in each for each in documents), document.count(word)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            total += idf * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    corpus = Corpus(Passage(str(i), text) for i, text in enumerate(texts))
    expected = sorted(filter(None, map(score, documents)), reverse=True)[:top_k]
    for backend in RETRIEVERS:
        found = [hit.score for hit in build_retriever(corpus, backend).search(query, top_k)]
        assert found == pytest.approx(expected, abs=2e-4)


def test_rounding_errors_do_not_decide_the_order():
    scores = np.array([0.3 + 0.2 + 0.1, 0.1 + 0.2 + 0.3])  # the same weights in another order
    assert scores[0] < scores[1]
    retriever = build_retriever(Corpus(PASSAGES[:2]))
    retriever._scores = lambda words: scores
    assert [hit.index for hit in retriever.search("norway", 2)] == [0, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "x"}, r"passages\.jsonl, row 2: field 'text' is missing"),
        ({"title": 3, "text": ""}, "row 2: field 'title' must be a string, not 3"),
    ],
)
def test_passages_are_read_in_order_and_a_wrong_row_is_named(tmp_path, row, message):
    path = tmp_path / "passages.jsonl"
    path.write_text(json.dumps({"id": 3, "title": "a", "text": ""}) + "\n", encoding="utf-8")
    assert load_passages(path) == [Passage("a", "")]
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(row), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_passages(path)
