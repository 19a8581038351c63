"""Claims, their contradictions, and the scores of verdicts and citations."""

import json

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import Task
from agent_envs.envs.qa.claims import contradict, make_claims, state
from agent_envs.scoring import normalize_answer
from tests.agent_envs.envs.playing import answer, call, solve

CLAIMS = "AgentR1/ClaimVerification-v0"


def chain(id, film, director, place, place_id):
    return Task(
        id=id,
        question=f"Where was the director of {film} born?",
        answers=(place,),
        data={
            "gold": ((film, f"{director} directed it."), (director, f"Born in {place}.")),
            "evidences": ((film, "director", director), (director, "place of birth", place)),
            "evidences_id": (("", "", ""), ("", "", place_id)),
        },
    )


def comparison(question, answer, *titles):
    gold = tuple((title, "A text.") for title in titles)
    return Task(id="c", question=question, answers=(answer,), data={"gold": gold})


@pytest.fixture
def env(data_files):
    return gym.make(CLAIMS, data=data_files[CLAIMS])


def test_a_chain_of_facts_is_a_claim_and_another_place_contradicts_it():
    tasks = [
        chain("a", "Iron River", "Leo Falk", "Oslo", "Q1"),
        chain("b", "Red Harbor", "Ada Holm", "Christiania", "Q1"),  # the same place
        chain("c", "Blue Sky", "Mira Lund", "Oslo, Norway", "Q3"),  # near it
        chain("d", "Old Mill", "Nico Dorn", "Kiel", "Q4"),
    ]
    claims = {claim.id[0] + claim.answers[0]: claim.question for claim in make_claims(tasks)}
    start = "Claim: The place of birth of the director of"
    assert claims["asupported"] == f"{start} Iron River is Oslo."
    assert claims["arefuted"] == f"{start} Iron River is Kiel."


@pytest.mark.parametrize(
    ("question", "true", "titles", "false"),
    [
        ("Are Leo and Mira painters?", "yes", ("Leo", "Mira"), "no"),
        ("Which is older, Red Sea Or Old Mill?", "Old Mill", ("Red Sea", "Old Mill"), "Red Sea"),
        # spelled as in the question, or the spelling would tell the verdict
        ("Is Up The Hill (film) or Old Mill older?", "Old Mill", ("Up the hill (film)", "Old Mill"),
         "Up The Hill"),
        ("Who painted it?", "Ada Holm", ("Ada Holm",), None),  # nobody else is known
    ],
)  # fmt: skip
def test_comparisons_are_contradicted_by_the_other_entity(question, true, titles, false):
    task = comparison(question, true, *titles)
    statement = state(task)
    assert contradict(statement, task, [statement], np.random.default_rng(0)) == false


def test_no_contradiction_is_in_the_gold_passages(shared_data):
    file = str(shared_data / "2wikimultihopqa_dev.jsonl.gz")
    env = gym.make(CLAIMS, data=file).unwrapped
    tasks = [env.get_task(i) for i in range(env.num_tasks)]
    assert abs(sum(t.answers == ("supported",) for t in tasks) / len(tasks) - 0.5) < 0.05
    facts = [t for t in tasks if "The answer to" not in t.question and t.answers == ("refuted",)]
    assert len(facts) > 150
    for task in facts:
        claimed = normalize_answer(task.question.rpartition(" is ")[2])
        passages = normalize_answer(" ".join(text for _, text in task.data["gold"]))
        assert f" {claimed} " not in f" {passages} ", task.id


def test_a_solution_has_the_verdict_and_exactly_the_gold_passages(env):
    earned, info = solve(env, 0)
    assert earned == pytest.approx(1.5)  # joint_em, exact_match, citation_f1 and progress
    assert info["metrics"]["success"] == info["metrics"]["citation_em"] == 1.0


def test_verdict_and_citations_are_scored_apart(env):
    env.reset(options={"task": 0})
    *searches_and_notes, verdict = env.unwrapped.reference_actions()
    for action in searches_and_notes:
        env.step(action)
    call(env, "note", text="Not evidence.", title="Blue Harbor")
    info = env.step(verdict)[4]
    # two of three cited passages are gold: precision 2/3, recall 1
    assert info["metrics"]["citation_f1"] == pytest.approx(0.8)
    assert (info["metrics"]["exact_match"], info["metrics"]["success"]) == (1.0, 0.0)


def test_a_gold_passage_that_no_search_showed_is_no_citation(env):
    env.reset(options={"task": 0})
    base = env.unwrapped
    for title, _ in base.task.data["gold"]:
        call(env, "note", text="From memory.", title=title)
    info = answer(env, base.task.answers[0])[4]
    assert (info["metrics"]["citation_f1"], info["metrics"]["success"]) == (0.0, 0.0)


def test_calls_beyond_those_of_the_solution_are_charged_at_most_ten_times(data_files):
    env = gym.make(CLAIMS, data=data_files[CLAIMS], max_episode_steps=30)
    env.reset(options={"task": 0})
    free = env.unwrapped.num_free_calls
    costs = [
        call(env, "note", text=f"Note {number}.")[4]["reward_terms"]["extra_call"]
        for number in range(free + 12)
    ]
    assert costs == [0.0] * free + [-0.02] * 10 + [0.0] * 2


def test_rows_of_both_data_sets_may_be_in_one_file(env):
    questions = [env.unwrapped.get_task(i).question for i in range(env.unwrapped.num_tasks)]
    assert "Claim: The place of birth of the director of Iron River is Oslo." in questions
    assert any(json.dumps("Norway") in question for question in questions)


@pytest.mark.parametrize(
    "name", ["2wikimultihopqa_dev.jsonl.gz", "hotpotqa_dev_distractor.jsonl.gz"]
)
def test_reference_actions_solve_claims_of_real_rows(shared_data, name):
    env = gym.make(CLAIMS, data=str(shared_data / name))
    for task in range(0, env.unwrapped.num_tasks, 40):
        earned, info = solve(env, task)
        assert info["metrics"]["success"] == 1.0, info["task_id"]
        assert earned == pytest.approx(1.5)
