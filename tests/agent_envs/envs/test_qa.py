"""Question-answering data sets: rows, passages, rewards and metrics."""

import gzip
import json

import datasets
import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, DataError
from tests.agent_envs.envs.playing import answer, call, make, solve
from tests.example_rows import EXAMPLE_ROWS, HOTPOT_ROWS, MUSIQUE_ROWS, TWO_WIKI_ROWS

HOTPOT = "AgentR1/HotpotQA-v0"
TWO_WIKI = "AgentR1/2WikiMultihopQA-v0"
MUSIQUE = "AgentR1/MuSiQue-v0"
PAGE = MUSIQUE_ROWS[0]["paragraphs"][0]
SEARCH_R1 = {
    "nq": "AgentR1/NaturalQuestions-v0", "triviaqa": "AgentR1/TriviaQA-v0",
    "popqa": "AgentR1/PopQA-v0",
}  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def search(env, query):
    observation, *_, info = call(env, "search", query=query)
    return observation, info


def test_process_rewards_credit_new_passages_and_charge_repetitions_and_mistakes(hotpot_file):
    hotpot = make(HOTPOT, data=hotpot_file, top_k=1)
    for query, earned in (("Red Harbor", 0.1), ("film red harbor", 0.0)):
        assert search(hotpot, query)[1]["reward_terms"]["new_gold_passage"] == earned
    first = search(hotpot, "Ada Holm")[1]["reward_terms"]
    again = search(hotpot, "  who is the ada  HOLM ?!")[1]
    assert [first["new_gold_passage"], first["repeated_query"], first["format"]] == [0.1, 0.0, 0.0]
    assert again["reward_terms"]["repeated_query"] == -0.05
    assert again["metrics"]["num_repeated_queries"] == 1
    hotpot.reset(options={"task": 0})
    assert hotpot.step("hm")[4]["reward_terms"]["format"] == -0.02


CALL = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'


def test_the_first_papers_final_reward(hotpot_file):
    env = make(HOTPOT, data=hotpot_file, rewards={"format_and_answer": 1.0}, max_episode_steps=2)
    for actions, final in (
        # well-formed throughout: r_f = EM
        (["<answer>Norway</answer>"], 1.0),
        (["<answer>Denmark</answer>"], 0.0),
        # answered, but one turn malformed: r_format = 1/2, r_f = -1/2
        (["hm", "<answer>Norway</answer>"], -0.5),
        # no answer within the two turns, well-formed: r_format = 1/2
        ([CALL, CALL], -0.5),
        # no answer, malformed: r_format = 0
        (["hm", "hm"], -1.0),
    ):
        env.reset(options={"task": 0})
        rewards = [env.step(action)[1] for action in actions]
        assert rewards == [0.0] * (len(actions) - 1) + [final]


def as_original_hotpot(row):
    context = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
    facts = row["supporting_facts"]
    facts = list(zip(facts["title"], facts["sent_id"], strict=True))
    return {"_id": row["id"], **{k: row[k] for k in ("question", "answer", "type", "level")},
            "context": context, "supporting_facts": facts}  # fmt: skip


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


@pytest.mark.parametrize(
    ("env_id", "rows", "kind"),
    [
        (HOTPOT, HOTPOT_ROWS, "jsonl.gz"),
        (HOTPOT, HOTPOT_ROWS, "dataset"),
        (HOTPOT, [as_original_hotpot(row) for row in HOTPOT_ROWS], "json"),
        (TWO_WIKI, [as_strings(row) for row in TWO_WIKI_ROWS], "json"),
        (TWO_WIKI, [as_dicts(row) for row in TWO_WIKI_ROWS], "json"),
    ],
)
def test_every_form_of_the_data_gives_the_same_tasks(data_files, tmp_path, env_id, rows, kind):
    data = tmp_path / f"rows.{kind}"
    if kind == "jsonl.gz":
        with gzip.open(data, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    elif kind == "dataset":
        data = datasets.Dataset.from_list(rows)
    else:
        data.write_text(json.dumps(rows), encoding="utf-8")
    expected = gym.make(env_id, data=data_files[env_id]).unwrapped
    env = gym.make(env_id, data=data if kind == "dataset" else str(data)).unwrapped
    tasks = [[each.get_task(i) for i in range(len(rows))] for each in (env, expected)]
    assert tasks[0] == tasks[1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("HotpotQA", {"answer": None}, "field 'answer' is missing"),
        ("HotpotQA", {"question": " "}, "'question' must be a non-empty string"),
        ("HotpotQA", {"supporting_facts": 3}, "'supporting_facts' is malformed"),
        ("2WikiMultihopQA", {"context": [["Iron River", "no list"]]}, "'context' is"),
        ("HotpotQA", {"supporting_facts": [["Oslo", 0.9]]}, "'supporting_facts' is"),
        ("MuSiQue", {"paragraphs": [PAGE | {"title": None}]}, "'paragraphs'"),
        ("MuSiQue", {"paragraphs": [PAGE | {"paragraph_text": ["a"]}]}, "paragraphs' is malformed"),
        ("MuSiQue", {"paragraphs": [PAGE | {"is_supporting": "no"}]}, "'is_supporting' must be"),
        ("MuSiQue", {"answer_aliases": [None]}, "'answer_aliases' is malformed"),
        ("MuSiQue", {"answerable": "false"}, "'answerable' must be true or false"),
        ("NaturalQuestions", {"golden_answers": None}, "field 'golden_answers'"),
        ("NaturalQuestions", {"golden_answers": ["Ada", None]}, "'golden_answers' is malformed"),
        ("GSM8K", {"answer": "27."}, "field 'answer' must end with"),
        ("MATH", {"solution": "no box", "answer": None}, "no answer"),
        ("MBPP", {"test_list": []}, "field 'test_list'"),
        ("HumanEval", {"test": ""}, "field 'test'"),
    ],
)
def test_a_malformed_row_is_an_error_with_file_row_and_field(tmp_path, name, change, message):
    row = EXAMPLE_ROWS[name][0]
    path = write(tmp_path / "rows.jsonl", [row, row | change])
    with pytest.raises(DataError, match=f"row 2: .*{message}") as error:
        gym.make(f"AgentR1/{name}-v0", data=path)
    assert path in str(error.value)


def test_an_empty_alias_is_no_answer(tmp_path):
    row = MUSIQUE_ROWS[0] | {"answer_aliases": ["", "M. Lund"]}
    env = gym.make(MUSIQUE, data=write(tmp_path / "rows.jsonl", [row]))
    env.reset(seed=0)
    assert env.unwrapped.task.answers == ("Mira Lund", "M. Lund")


def test_a_missing_source_is_an_error_that_names_it(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read"):
        gym.make(HOTPOT, data="nowhere.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="Pass data= with a local file"):
        gym.make(HOTPOT, split="train")


def test_a_split_of_given_rows_is_refused(data_files):
    with pytest.raises(ConfigurationError, match="split='test' chooses a split of the public"):
        gym.make(HOTPOT, data=data_files[HOTPOT], split="test")


def test_passages_of_corpus_files_are_searched_once(data_files, tmp_path):
    corpus = write(tmp_path / "more.jsonl", [{"title": "Zebra", "text": "It has stripes."}] * 2)
    env = make(HOTPOT, data=data_files[HOTPOT], corpus=corpus)
    assert search(env, "zebra")[0] == "[1] Zebra\nIt has stripes."


def test_cited_facts_and_evidence_are_scored_jointly_with_the_answer(data_files):
    env = make(
        TWO_WIKI, data=data_files[TWO_WIKI], tools=["note"], max_episode_steps=10,
        rewards={"exact_match": 1.0, "joint_f1": 0.5, "supporting_fact_f1": 0.25},
    )  # fmt: skip
    call(env, "note", text="Iron River | Director | leo falk!", title="iron river", sentence=1)
    call(env, "note", text="a wrong one", title="Iron Bridge", sentence=0)
    info = answer(env, "Oslo")[4]
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
    _, info = solve(env)
    for name in ("supporting_fact_em", "evidence_em", "joint_em", "joint_f1"):
        assert info["metrics"][name] == 1.0


def test_aliases_of_2wiki_count_for_answers_and_evidence(tmp_path):
    ids = {"answer_id": "Q585", "evidences_id": [["Q1", "director", "Q2"], ["Q2", "x", "Q585"]]}
    data = write(tmp_path / "rows.jsonl", [TWO_WIKI_ROWS[0] | ids])
    aliases = tmp_path / "id_aliases.json"  # the official file has a row a line
    aliases.write_text(
        '{"Q_id": "Q585", "aliases": ["Christiania"], "demonyms": ["Osloite"]}\n'
        '{"Q_id": "Q2", "aliases": ["L. Falk"], "demonyms": []}\n'
    )
    kwargs = {"data": data, "tools": ["note"], "max_episode_steps": 9}
    for more, expected in (({}, 0.0), ({"aliases": str(aliases)}, 1.0)):
        env = make(TWO_WIKI, **kwargs, **more)
        for text in ("Iron River|director|l falk", "L. Falk|place of birth|Christiania"):
            call(env, "note", text=text)
        metrics = answer(env, "osloite")[4]["metrics"]
        assert metrics["success"] == metrics["evidence_em"] == expected
    assert env.unwrapped.get_task(0).answers == ("Oslo", "Christiania", "Osloite")
    aliases.write_text('{"Q_id": "Q2", "aliases": []}\n')
    with pytest.raises(DataError, match=r"id_aliases.json, row 1: field 'demonyms' is missing"):
        make(TWO_WIKI, **kwargs, aliases=str(aliases))


def test_musique_identifies_passages_by_title_and_text(data_files):
    env = make(MUSIQUE, data=data_files[MUSIQUE], top_k=1)
    queries = ("Vik has a harbour", "mayor Mira Lund")
    earned = [search(env, query)[1]["reward_terms"]["new_gold_passage"] for query in queries]
    assert earned == pytest.approx([0.0, 0.1])
    assert answer(env, "m. lund")[4]["metrics"]["success"] == 1.0  # an alias


def test_unanswerable_questions_are_optional_and_scored_in_pairs(data_files):
    assert gym.make(MUSIQUE, data=data_files[MUSIQUE]).unwrapped.num_tasks == 1
    env = gym.make(MUSIQUE, data=data_files[MUSIQUE], unanswerable=True, tools=["note"])
    assert env.unwrapped.num_tasks == 2
    outcomes = {}
    for task, text in ((0, "m lund"), (1, "Unanswerable."), (0, "unanswerable"), (1, "Nico")):
        _, info = env.reset(options={"task": task})
        assert "answer: unanswerable" in info["messages"][0]["content"]
        call(env, "note", text="x", title="Vik")
        metrics = answer(env, text)[4]["metrics"]
        assert metrics["sufficiency"] == metrics["success"]
        outcomes[info["task_id"], text] = metrics["sufficiency"]
        if task == 0:  # one of two supporting titles
            assert metrics["support_f1"] == pytest.approx(2 / 3)
        assert ("support_f1" in metrics) == (task == 0)
    assert outcomes == {
        ("2hop__1_2", "m lund"): 1.0, ("2hop__3_4-unanswerable", "Unanswerable."): 1.0,
        ("2hop__1_2", "unanswerable"): 0.0, ("2hop__3_4-unanswerable", "Nico"): 0.0,
    }  # fmt: skip


def test_of_a_mixed_file_each_environment_reads_its_own_rows(data_files, tmp_path):
    for source, env_id in SEARCH_R1.items():
        env = gym.make(env_id, data=data_files[env_id])
        assert env.unwrapped.num_tasks == 1
        assert env.reset(options={"task": 0})[0] == f"What is asked in {source}?"
        _, reward, _, _, info = answer(env, f"the {source} TWO.")
        assert info["metrics"]["success"] == reward == 1.0
        assert "gold_passage_recall" not in info["metrics"]  # rows name no gold passages
    row = {"question": "Who?", "reward_model": {"ground_truth": {"target": ["Ada", "Ada Holm"]}}}
    env = gym.make(SEARCH_R1["nq"], data=write(tmp_path / "rows.jsonl", [row]))
    assert env.unwrapped.get_task(0).answers == ("Ada", "Ada Holm")


def test_a_retriever_is_a_name_or_searches(data_files):
    with pytest.raises(ConfigurationError, match="retriever= takes a name or a `Retriever`, not 5"):
        make(MUSIQUE, data=data_files[MUSIQUE], retriever=5)
