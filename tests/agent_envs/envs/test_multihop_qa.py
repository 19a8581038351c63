import json

import datasets
import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, DataError, UnknownNameError
from tests.conftest import MUSIQUE_ROWS, TWO_WIKI_ROWS

TWO_WIKI = "AgentR1/2WikiMultihopQA-v0"
MUSIQUE = "AgentR1/MuSiQue-v0"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def as_strings(row):
    nested = ("context", "supporting_facts", "evidences")
    return row | {name: json.dumps(row[name]) for name in nested}


def as_dicts(row):
    titles, sentences = zip(*row["context"], strict=True)
    names, numbers = zip(*row["supporting_facts"], strict=True)
    return row | {
        "context": {"title": list(titles), "content": list(sentences)},
        "supporting_facts": {"title": list(names), "sent_id": list(numbers)},
    }


@pytest.mark.parametrize("form", [as_strings, as_dicts])
@pytest.mark.parametrize("is_file", [True, False])
def test_every_form_of_2wiki_gives_the_same_task(data_files, tmp_path, form, is_file):
    expected = gym.make(TWO_WIKI, data=data_files[TWO_WIKI]).unwrapped.get_task(0)
    rows = [form(row) for row in TWO_WIKI_ROWS]
    data = write(tmp_path / "rows.jsonl", rows) if is_file else datasets.Dataset.from_list(rows)
    assert gym.make(TWO_WIKI, data=data).unwrapped.get_task(0) == expected
    assert expected.data["evidences"][0] == ("Iron River", "director", "Leo Falk")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evidences": "[["}, "row 1: field 'evidences' is malformed"),
        ({"evidences": [["a", "b"]]}, "row 1: field 'evidences' is malformed"),
        ({"context": [["Iron River", "not a list"]]}, "row 1: field 'context' is malformed"),
        ({"supporting_facts": [["Iron River", "one"]]}, "row 1: field 'supporting_facts'"),
    ],
)
def test_a_malformed_2wiki_row_is_named(tmp_path, change, message):
    path = write(tmp_path / "rows.jsonl", [TWO_WIKI_ROWS[0] | change])
    with pytest.raises(DataError, match=message):
        gym.make(TWO_WIKI, data=path)


def test_cited_facts_and_evidence_are_scored_jointly_with_the_answer(data_files):
    env = gym.make(
        TWO_WIKI, data=data_files[TWO_WIKI], tools=["note"], max_episode_steps=10,
        rewards={"exact_match": 1.0, "joint_f1": 0.5, "supporting_fact_f1": 0.25},
    )  # fmt: skip
    env.reset(options={"task": 0})
    for text, title, sentence in (
        ("Iron River | Director | leo falk!", "iron river", 1),
        ("a wrong one", "Iron Bridge", 0),
    ):
        note = {"text": text, "title": title, "sentence": sentence}
        env.step(env.unwrapped.write_call("note", **note))
    _, _, _, _, info = env.step(env.unwrapped.write_answer("Oslo"))
    metrics = info["metrics"]
    # one of two cited facts is gold, one of two gold facts is cited
    assert metrics["supporting_fact_em"] == 0.0
    assert metrics["supporting_fact_f1"] == pytest.approx(0.5)
    # the only triple is right, one of two
    assert metrics["evidence_f1"] == pytest.approx(2 / 3)
    # precision 1 * 1/2 * 1, recall 1 * 1/2 * 1/2
    assert metrics["joint_f1"] == pytest.approx(2 * 0.5 * 0.25 / 0.75)
    assert metrics["joint_em"] == 0.0
    assert info["reward_terms"] == pytest.approx(
        {"exact_match": 1.0, "joint_f1": 0.5 / 3, "supporting_fact_f1": 0.125}
    )


def test_reference_actions_cite_everything(data_files):
    env = gym.make(TWO_WIKI, data=data_files[TWO_WIKI], tools=["note"], max_episode_steps=10)
    env.reset(options={"task": 0})
    for action in env.unwrapped.reference_actions():
        *_, info = env.step(action)
    for name in ("supporting_fact_em", "evidence_em", "joint_em", "joint_f1"):
        assert info["metrics"][name] == 1.0


def test_a_reward_for_citations_needs_notes(data_files):
    with pytest.raises(ConfigurationError, match=r"joint_f1.*note"):
        gym.make(TWO_WIKI, data=data_files[TWO_WIKI], rewards={"joint_f1": 1.0})


def test_an_unknown_tool_name_gets_those_there_are(data_files):
    with pytest.raises(UnknownNameError, match="find_in_page"):
        gym.make(TWO_WIKI, data=data_files[TWO_WIKI], tools=["find_page"])


@pytest.mark.parametrize("answer", ["Mira Lund", "m. lund"])
def test_aliases_of_a_musique_answer_count(data_files, answer):
    env = gym.make(MUSIQUE, data=data_files[MUSIQUE])
    env.reset(options={"task": 0})
    assert env.step(env.unwrapped.write_answer(answer))[4]["metrics"]["success"] == 1.0


def test_a_passage_with_the_title_of_a_gold_one_is_not_gold(data_files):
    env = gym.make(MUSIQUE, data=data_files[MUSIQUE], top_k=1)
    env.reset(options={"task": 0})
    other = env.step(env.unwrapped.write_call("search", query="Vik has a harbour"))[4]
    assert other["reward_terms"]["new_gold_passage"] == 0.0
    gold = env.step(env.unwrapped.write_call("search", query="mayor Mira Lund"))[4]
    assert gold["reward_terms"]["new_gold_passage"] == pytest.approx(0.1)


def test_unanswerable_questions_are_played_on_demand(data_files):
    assert gym.make(MUSIQUE, data=data_files[MUSIQUE]).unwrapped.num_tasks == 1
    env = gym.make(MUSIQUE, data=data_files[MUSIQUE], unanswerable=True)
    assert env.unwrapped.num_tasks == 2
    _, info = env.reset(options={"task": 1})
    assert "answer: unanswerable" in info["messages"][0]["content"]
    assert env.step(env.unwrapped.write_answer("Nico Arden"))[4]["metrics"]["success"] == 0.0
    env.reset(options={"task": 1})
    assert env.step(env.unwrapped.write_answer("Unanswerable."))[4]["metrics"]["success"] == 1.0


def test_musique_f1_is_that_of_its_own_script(tmp_path):
    row = MUSIQUE_ROWS[0] | {"answer": "no", "answer_aliases": []}
    env = gym.make(MUSIQUE, data=write(tmp_path / "rows.jsonl", [row]))
    env.reset(options={"task": 0})
    *_, info = env.step(env.unwrapped.write_answer("no idea"))
    assert info["metrics"]["f1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        (TWO_WIKI, "2wikimultihopqa_dev.jsonl.gz"),
        (MUSIQUE, "musique_dev.jsonl.gz"),
        (MUSIQUE, "musique_train.jsonl.gz"),
        ("AgentR1/Bamboogle-v0", "bamboogle_test.jsonl"),
    ],
)
def test_oracle_play_solves_every_real_row(shared_data, env_id, name):
    env = gym.make(env_id, data=str(shared_data / name))
    for task in range(env.unwrapped.num_tasks):
        env.reset(options={"task": task})
        for action in env.unwrapped.reference_actions():
            _, _, terminated, _, info = env.step(action)
        assert terminated
        assert info["metrics"]["success"] == 1.0
        # a row of Bamboogle says nothing about gold passages
        recall = None if "Bamboogle" in env_id else 1.0
        assert info["metrics"].get("gold_passage_recall") == recall


def test_aliases_of_2wiki_count_for_answers_and_evidence(tmp_path):
    ids = {"answer_id": "Q585", "evidences_id": [["Q1", "director", "Q2"], ["Q2", "x", "Q585"]]}
    data = write(tmp_path / "rows.jsonl", [TWO_WIKI_ROWS[0] | ids])
    aliases = tmp_path / "id_aliases.json"  # the official file has a row a line
    aliases.write_text(
        '{"Q_id": "Q585", "aliases": ["Christiania"], "demonyms": ["Osloite"]}\n'
        '{"Q_id": "Q2", "aliases": ["L. Falk"], "demonyms": []}\n'
    )
    args = {"data": data, "tools": ["note"], "max_episode_steps": 9}
    plain = gym.make(TWO_WIKI, **args)
    known = gym.make(TWO_WIKI, aliases=str(aliases), **args)
    for env, expected in ((plain, 0.0), (known, 1.0)):
        env.reset(options={"task": 0})
        for text in ("Iron River|director|l falk", "L. Falk|place of birth|Christiania"):
            env.step(env.unwrapped.write_call("note", text=text))
        metrics = env.step(env.unwrapped.write_answer("osloite"))[4]["metrics"]
        assert metrics["success"] == metrics["evidence_em"] == expected
    assert known.unwrapped.get_task(0).answers == ("Oslo", "Christiania", "Osloite")


def test_the_articles_of_2wiki_evidence_count(data_files):
    env = gym.make(TWO_WIKI, data=data_files[TWO_WIKI], tools=["note"])
    env.reset(options={"task": 0})
    call = env.unwrapped.write_call("note", text="the Iron River | director | Leo Falk")
    assert env.step(call)[4]["metrics"]["evidence_f1"] == 0.0


def test_a_pair_of_musique_has_two_ids_and_says_who_told_them_apart(data_files):
    env = gym.make(MUSIQUE, data=data_files[MUSIQUE], unanswerable=True, tools=["note"])
    told = {}
    for task, answer in ((0, "m lund"), (1, "unanswerable"), (0, "unanswerable"), (1, "Nico")):
        _, info = env.reset(options={"task": task})
        env.step(env.unwrapped.write_call("note", text="x", title="Vik"))
        metrics = env.step(env.unwrapped.write_answer(answer))[4]["metrics"]
        told[info["task_id"], answer] = metrics["sufficiency"]
        if task == 0:  # one of two supporting titles
            assert metrics["support_f1"] == pytest.approx(2 / 3)
        assert ("support_f1" in metrics) == (task == 0)
    assert told == {
        ("2hop__1_2", "m lund"): 1.0, ("2hop__3_4-unanswerable", "unanswerable"): 1.0,
        ("2hop__1_2", "unanswerable"): 0.0, ("2hop__3_4-unanswerable", "Nico"): 0.0,
    }  # fmt: skip
