import gzip
import json

import datasets
import gymnasium as gym
import pytest

from agent_envs import DataError
from tests.conftest import HOTPOT_ROWS

ID = "AgentR1/HotpotQA-v0"


def call(query):
    arguments = json.dumps({"name": "search", "arguments": {"query": query}})
    return f"<tool_call>{arguments}</tool_call>"


@pytest.fixture
def env(hotpot_file):
    env = gym.make(ID, data=hotpot_file, top_k=1)
    env.reset(seed=0, options={"task": 0})
    return env


def test_each_new_gold_passage_earns_its_share_once(env):
    assert env.step(call("Red Harbor"))[4]["reward_terms"]["new_gold_passage"] == 0.1
    assert env.step(call("film Red Harbor"))[4]["reward_terms"]["new_gold_passage"] == 0.0
    assert env.step(call("Ada Holm"))[4]["reward_terms"]["new_gold_passage"] == 0.1


def test_a_repeated_query_costs(env):
    assert env.step(call("Ada Holm"))[4]["reward_terms"]["repeated_query"] == 0.0
    info = env.step(call("  who is the ada  HOLM ?!"))[4]
    assert info["reward_terms"]["repeated_query"] == -0.05
    assert info["metrics"]["num_repeated_queries"] == 1


def test_a_mistake_costs_and_a_well_formed_action_does_not(env):
    assert env.step(call("Ada"))[4]["reward_terms"]["format"] == 0.0
    assert env.step("hm")[4]["reward_terms"]["format"] == -0.02


@pytest.mark.parametrize(
    ("answer", "reward"), [("norway", 1.0), ("the Norway.", 1.0), ("Denmark", 0.0)]
)
def test_the_answer_is_scored_by_official_exact_match(env, answer, reward):
    _, _, terminated, _, info = env.step(f"<answer>{answer}</answer>")
    assert terminated
    assert info["reward_terms"]["exact_match"] == reward
    assert info["action"] == {"kind": "answer", "answer": answer}


@pytest.mark.parametrize(
    ("actions", "final"),
    [
        # well-formed throughout: r_f = EM
        (["<answer>Norway</answer>"], 1.0),
        (["<answer>Denmark</answer>"], 0.0),
        # answered, but one turn malformed: r_format = 1/2, r_f = -1/2
        (["hm", "<answer>Norway</answer>"], -0.5),
        # no answer within the two turns, well-formed: r_format = 1/2
        ([call("a"), call("b")], -0.5),
        # no answer, malformed: r_format = 0
        (["hm", "hm"], -1.0),
    ],
)
def test_the_first_papers_final_reward(hotpot_file, actions, final):
    env = gym.make(ID, data=hotpot_file, rewards={"format_and_answer": 1.0}, max_episode_steps=2)
    env.reset(options={"task": 0})
    rewards = [env.step(action)[1] for action in actions]
    assert rewards == [0.0] * (len(actions) - 1) + [final]


def test_passages_of_corpus_files_are_searched_too_and_each_once(hotpot_file, tmp_path):
    corpus = tmp_path / "more.jsonl"
    rows = [{"title": "Zebra", "text": "A zebra has stripes."}] * 2
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    env = gym.make(ID, data=hotpot_file, corpus=[str(corpus)])
    env.reset(seed=0)
    assert env.step(call("zebra"))[0] == "[1] Zebra\nA zebra has stripes."


def original_form(row):
    context = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
    facts = row["supporting_facts"]
    facts = list(zip(facts["title"], facts["sent_id"], strict=True))
    return {"_id": row["id"], **{k: row[k] for k in ("question", "answer", "type", "level")},
            "context": context, "supporting_facts": facts}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "parquet", "original", "dataset"])
def test_every_form_of_the_data_gives_the_same_tasks(kind, hotpot_file, tmp_path):
    data = tmp_path / f"rows.{kind}"
    if kind == "jsonl.gz":
        with gzip.open(data, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in HOTPOT_ROWS)
    elif kind == "parquet":
        datasets.Dataset.from_list(HOTPOT_ROWS).to_parquet(str(data))
    elif kind == "dataset":
        data = datasets.Dataset.from_list(HOTPOT_ROWS)
    else:
        data = data.with_suffix(".json")
        rows = [original_form(row) if kind == "original" else row for row in HOTPOT_ROWS]
        data.write_text(json.dumps(rows), encoding="utf-8")
    expected = gym.make(ID, data=hotpot_file).unwrapped
    env = gym.make(ID, data=data if kind == "dataset" else str(data)).unwrapped
    assert [env.get_task(i) for i in range(2)] == [expected.get_task(i) for i in range(2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "row 2: field 'answer' is missing"),
        ({"question": " "}, "row 2: field 'question' must be a non-empty string"),
        ({"context": {"title": ["x"]}}, "row 2: field 'context' is malformed"),
        ({"context": {"title": ["x"], "sentences": []}}, "row 2: field 'context' is malformed"),
        ({"supporting_facts": 3}, "row 2: field 'supporting_facts' is malformed"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    rows = [HOTPOT_ROWS[0], {**HOTPOT_ROWS[1], **change}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        gym.make(ID, data=str(path))
    assert str(path) in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read"):
        gym.make(ID, data="nowhere.jsonl")


def test_a_hub_that_cannot_be_reached_says_how_to_pass_data(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="Pass data= with a local file"):
        gym.make(ID, split="train")


@pytest.mark.parametrize(
    "name",
    [
        "hotpotqa_dev_distractor.jsonl.gz",
        "hotpotqa_train_distractor.jsonl",
        "hotpotqa_dev_fullwiki.jsonl.gz",
    ],
)
def test_reference_actions_solve_every_real_row(shared_data, name):
    env = gym.make(ID, data=str(shared_data / name))
    num_full = 0
    for task in range(env.unwrapped.num_tasks):
        env.reset(options={"task": task})
        found = 0.0
        for action in env.unwrapped.reference_actions():
            _, reward, terminated, _, info = env.step(action)
            found += info["reward_terms"]["new_gold_passage"]
            assert sum(info["reward_terms"].values()) == reward
        assert terminated
        assert info["metrics"]["exact_match"] == 1
        num_full += abs(found - 0.2) < 1e-9
        assert (abs(found - 0.2) < 1e-9) == (info["metrics"]["gold_passage_recall"] == 1)
    assert num_full == env.unwrapped.num_tasks
