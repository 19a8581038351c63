import json
import pickle
import shutil

import gymnasium as gym
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs import ConfigurationError, DataError
from agent_envs.retrieval import Corpus, Passage, SavedIndex, build_retriever, save_index
from agent_envs.retrieval.__main__ import main

PASSAGES = [
    Passage("Oslo", "Oslo is the capital of Norway."),
    Passage("Bergen", "Bergen is a city in Norway."),
    Passage("Café \ud800", "Serves coffee, 東京 and half a pair \udfff."),
    Passage("", ""),
]


@pytest.fixture
def folder(tmp_path):
    save_index(Corpus(PASSAGES), tmp_path / "index")
    return tmp_path / "index"


TEXTS = st.text(st.characters(codec=None), max_size=30) | st.sampled_from(["a b", "red", "red sea"])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=12), TEXTS, st.integers(1, 5))
def test_a_saved_index_finds_the_same_as_one_in_memory(tmp_path_factory, pairs, query, top_k):
    corpus = Corpus(Passage(title, text) for title, text in pairs)
    path = tmp_path_factory.mktemp("saved") / "index"
    save_index(corpus, path)
    saved = SavedIndex(path)
    assert tuple(saved.passages) == corpus.passages
    for words in (query, *(title for title, _ in pairs)):
        assert saved.search(words, top_k) == build_retriever(corpus).search(words, top_k)


def test_an_index_is_pickled_by_its_path_and_overwrites_nothing(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    index = SavedIndex("index")
    monkeypatch.chdir("/")
    data = pickle.dumps(index)
    assert len(data) < 500
    assert pickle.loads(data).search("norway", 5) == index.search("norway", 5) != []
    with pytest.raises(ConfigurationError, match="exists already"):
        save_index(Corpus([]), folder)
    with pytest.raises(AttributeError):
        save_index(Corpus([Passage(None, "cannot be written")]), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_damage_of_every_file_is_found(folder):
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(whole) == 8
    for path, data in whole.items():
        for damaged in (None, b"", data[:-1], b"[]"):
            shutil.rmtree(folder)
            folder.mkdir()
            for other, content in (whole | {path: damaged}).items():
                if content is not None:
                    other.write_bytes(content)
            with pytest.raises(DataError, match="not an index, or damaged: "):
                SavedIndex(folder)
    (folder / path.name).write_bytes(whole[path])
    description = json.loads(whole[folder / "index.json"])
    for change in ({"version": 2}, {"k1": 0.9}, {"format": "a picture"}):
        (folder / "index.json").write_text(json.dumps(description | change))
        with pytest.raises(DataError, match="another kind"):
            SavedIndex(folder)


def test_an_environment_opens_an_index_of_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"title": p.title, "text": p.text} for p in PASSAGES[:2]]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "questions.jsonl").write_text(
        json.dumps({"id": "1", "question": "Capital of Norway?", "golden_answers": ["Oslo"]}) + "\n"
    )
    main(["corpus.jsonl", "index"])
    assert capsys.readouterr().out == "2 passages: index\n"
    name = "AgentR1/NaturalQuestions-v0"
    env = gym.make(name, data="questions.jsonl", retriever="index", top_k=1).unwrapped
    env.reset(seed=0)
    observation, *_ = env.step(env.write_call("search", query="capital"))
    assert "Oslo is the capital of Norway." in observation
