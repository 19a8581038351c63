import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import ConfigurationError, DataError, UnknownNameError
from agent_envs.data.records import read_records
from agent_envs.retrieval import RETRIEVERS, Corpus, Passage, build_retriever, load_passages
from agent_envs.retrieval.bm25 import BM25Retriever, build_postings

PASSAGES = [
    Passage("Oslo", "Oslo is the capital of Norway."),
    Passage("Bergen", "Bergen is a city in Norway."),
    Passage("Porto", "Porto is a city in Portugal."),
    Passage("Café", "A café serves coffee."),
    Passage("Riga", "Riga is the capital of Latvia."),
]


def titles(hits):
    return [hit.passage.title for hit in hits]


@pytest.mark.parametrize("backend", RETRIEVERS)
class TestEveryBackend:
    @pytest.mark.parametrize(
        ("query", "top_k", "expected"),
        [
            pytest.param("capital of Norway", 1, ["Oslo"], id="best first"),
            pytest.param("CAFE\u0301", 1, ["Café"], id="case and Unicode form"),
            pytest.param("who were they", 1, ["The Who"], id="only stop words"),
            pytest.param("city norway", 50, ["Bergen", "Oslo", "Porto"], id="fewer than top_k"),
            pytest.param("xylophone", 3, [], id="unknown word"),
            pytest.param("", 3, [], id="empty"),
            pytest.param("?!", 3, [], id="no word"),
        ],
    )
    def test_a_query_finds_the_best_passages(self, backend, query, top_k, expected):
        corpus = Corpus([*PASSAGES, Passage("The Who", "They were who they were.")])
        hits = build_retriever(corpus, backend).search(query, top_k)
        assert titles(hits) == expected

    def test_equal_passages_are_ordered_by_number(self, backend):
        # Two interleaved kinds of 25: a sort that is not stable would keep the order of a few.
        texts = ["same words here", "same same here"] * 25
        twins = [Passage(f"t{i}", text) for i, text in enumerate(texts)]
        twins += [Passage(f"u{i}", "something else entirely") for i in range(100)]
        expected = [f"t{i}" for i in [*range(1, 50, 2), *range(0, 50, 2)]]
        retriever = build_retriever(Corpus(twins), backend)
        for top_k in (2, 30, 50):
            assert titles(retriever.search("same", top_k)) == expected[:top_k]

    def test_tiny_and_empty_corpora_are_searched(self, backend):
        for size in (1, 2, 3):
            retriever = build_retriever(Corpus(PASSAGES[:size]), backend)
            for passage in PASSAGES[:size]:
                assert titles(retriever.search(passage.title, 1)) == [passage.title]
        for passages in ([], [Passage("", "?")]):
            assert build_retriever(Corpus(passages), backend).search("x", 1) == []

    def test_wrong_arguments_are_errors(self, backend):
        with pytest.raises(UnknownNameError, match=f"Did you mean '{backend}'"):
            build_retriever(Corpus(PASSAGES), f"{backend}x")
        with pytest.raises(ConfigurationError, match="top_k"):
            build_retriever(Corpus(PASSAGES), backend).search("x", 0)


WORDS = st.sampled_from("red blue green harbor film star city old new the of".split())
TEXTS = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)


@given(st.lists(TEXTS, min_size=1, max_size=20), TEXTS, st.integers(1, 25))
def test_all_engines_find_the_same_passages_with_the_same_scores(texts, query, top_k):
    corpus = Corpus(Passage(str(i), text) for i, text in enumerate(texts))
    one, *others = (build_retriever(corpus, name).search(query, top_k) for name in RETRIEVERS)
    for other in others:
        assert [hit.score for hit in one] == pytest.approx([hit.score for hit in other], abs=2e-4)
        assert {hit.index for hit in one if hit.score > one[-1].score + 1e-3} == {
            hit.index for hit in other if hit.score > one[-1].score + 1e-3
        }


def test_rounding_errors_do_not_decide_the_order():
    scores = np.array([0.3 + 0.2 + 0.1, 0.1 + 0.2 + 0.3])  # the same weights in another order
    assert scores[0] < scores[1]
    retriever = BM25Retriever(PASSAGES[:2], lambda words: scores)
    assert [hit.index for hit in retriever.search("norway", 2)] == [0, 1]


def test_all_engines_agree_on_real_passages(shared_data):
    passages = load_passages(shared_data / "hotpotqa_extra_passages.jsonl.gz")
    rows = read_records(shared_data / "hotpotqa_dev_distractor.jsonl.gz")
    queries = [row["question"] for row in rows[::3]]
    queries += [f"{passage.title} {passage.text[:60]}" for passage in passages[::60]]
    engines = [build_retriever(Corpus(passages), name) for name in RETRIEVERS]
    for query in queries:
        one, *others = ([(h.index, h.score) for h in e.search(query, 5)] for e in engines)
        assert all(other == one for other in others)


SEARCH_SCRIPT = """
from agent_envs.retrieval import RETRIEVERS, Corpus, Passage, build_retriever
words = "red blue green harbor film star city old new river".split()
texts = [" ".join(words[(i * j) % 10] for j in range(1, 8)) for i in range(200)]
corpus = Corpus(Passage(str(i), text) for i, text in enumerate(texts))
for name in RETRIEVERS:
    hits = build_retriever(corpus, name).search("old red harbor film star", 20)
    print([(hit.index, hit.score) for hit in hits])
"""


def test_results_do_not_depend_on_the_hash_seed():
    outputs = []
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SEARCH_SCRIPT]
        outputs.append(subprocess.check_output(command, env=environment, text=True))
    assert outputs[0] == outputs[1]
    one, *others = outputs[0].splitlines()
    assert one != "[]"
    assert others == [one]


def test_a_repeated_word_is_looked_up_once():
    looked_up = []

    class Words(dict):
        def get(self, word):
            looked_up.append(word)
            return super().get(word)

    postings = build_postings([["a", "b"], ["a"]])
    postings = dataclasses.replace(postings, words=Words(postings.words))
    scores = postings(["a"] * 1000)
    assert looked_up == ["a"]
    assert scores == pytest.approx(1000 * postings(["a"]))


def test_a_passage_without_text_is_an_error(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_text(json.dumps({"title": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"passages\.jsonl, row 1: field 'text' is missing"):
        load_passages(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_passages_are_read_in_order_without_other_fields(suffix, tmp_path):
    path = tmp_path / f"passages.{suffix}"
    rows = [{"title": p.title, "text": p.text, "id": i} for i, p in enumerate(PASSAGES)]
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert load_passages(path) == PASSAGES
