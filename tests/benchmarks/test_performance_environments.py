import argparse
import json
from itertools import islice

from agent_envs.retrieval import Passage
from benchmarks.performance.environments import describe, main, measure_vectors
from benchmarks.performance.retrieval import pad


def test_parts_are_measured_anew_and_peers_that_are_not_installed_are_marked(tmp_path, capsys):
    vectors = {"kept": {"steps per second": 7.0}}
    (tmp_path / "table.json").write_text(json.dumps({"vectors": vectors, "overhead": "old"}))
    output = str(tmp_path / "table.md")
    main(["--parts", "overhead", "--rounds", "1", "--output", output])
    results = json.loads((tmp_path / "table.json").read_text())
    assert results["vectors"] == vectors
    assert results["overhead"]["ours"]["turn 1000"] > 0
    page = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out == page + "\n"
    assert "| environment | reset | turn 1 | turn 10 | turn 100 | turn 1000 |" in page
    assert page.count("| not installed | not installed |") == 2 * 3
    assert "| kept | 7 |" in page


def test_members_whose_tools_wait_together_are_faster_than_one_by_one():
    vectors = measure_vectors(argparse.Namespace(members=4))
    page = describe({"machine": "m", "members": 4, "vectors": vectors}, "command")
    assert "## 4 members with a tool of 100 ms" in page
    assert vectors["ours (threads)"]["times one by one"] > 1.2
    assert vectors["Gymnasium, sync"]["times one by one"] <= 1


def test_a_padded_corpus_is_distinct_and_keeps_word_frequencies():
    passages = [Passage("A", "one two three four"), Passage("B", "five six")]
    padded = list(islice(pad(passages, 50), 50))
    assert padded[:2] == passages
    assert len(set(padded)) == 50
    assert all(
        sorted(p.text.split()) in (["five", "six"], ["four", "one", "three", "two"]) for p in padded
    )
    assert padded == list(pad(passages, 50))


def test_an_engine_that_cannot_is_shown_as_such():
    figures = {"build and save, s": 1.234, "open, ms": None}
    page = describe(
        {"machine": "m", "retrieval": {"1000000": {"ours": figures, "x": None}}}, "command"
    )
    assert "## Retrieval among 1,000,000 passages" in page
    assert "| ours | 1.23 |  |" in page
    assert "| x | not measured | not measured |" in page
