import json

import gymnasium as gym
import pytest

from agent_envs import DataError
from tests.conftest import SEARCH_R1_ROWS

IDS = {
    "nq": "AgentR1/NaturalQuestions-v0",
    "triviaqa": "AgentR1/TriviaQA-v0",
    "popqa": "AgentR1/PopQA-v0",
}


@pytest.mark.parametrize("source", IDS)
def test_of_a_mixed_file_each_environment_plays_its_own_rows(data_files, source):
    env = gym.make(IDS[source], data=data_files[IDS[source]])
    assert env.unwrapped.num_tasks == 1
    observation, _ = env.reset(options={"task": 0})
    assert observation == f"What is asked in {source}?"
    _, reward, _, _, info = env.step(env.unwrapped.write_answer(f"the {source} TWO."))
    assert info["metrics"]["success"] == 1.0
    assert reward == pytest.approx(1.0)
    assert "gold_passage_recall" not in info["metrics"]  # nothing says which passages are gold


def test_the_processed_form_is_read_too(tmp_path):
    row = {"question": "Who?", "reward_model": {"ground_truth": {"target": ["Ada", "Ada Holm"]}}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    task = gym.make(IDS["nq"], data=str(path)).unwrapped.get_task(0)
    assert task.answers == ("Ada", "Ada Holm")


@pytest.mark.parametrize("change", [{"golden_answers": None}, {"golden_answers": [" "]}])
def test_a_row_without_answers_is_named(tmp_path, change):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([SEARCH_R1_ROWS[0] | change]), encoding="utf-8")
    with pytest.raises(DataError, match="row 1: field 'golden_answers'"):
        gym.make(IDS["nq"], data=str(path))


def test_without_passages_a_search_finds_nothing_and_with_a_corpus_it_does(data_files, tmp_path):
    search = '<tool_call>{"name": "search", "arguments": {"query": "harbour"}}</tool_call>'
    env = gym.make(IDS["nq"], data=data_files[IDS["nq"]])
    env.reset(seed=0)
    assert env.step(search)[0] == "No passage matches this query."
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "Vik", "text": "Vik has a harbour."}), encoding="utf-8")
    env = gym.make(IDS["nq"], data=data_files[IDS["nq"]], corpus=str(corpus))
    env.reset(seed=0)
    assert env.step(search)[0] == "[1] Vik\nVik has a harbour."
