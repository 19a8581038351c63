import gymnasium as gym
import numpy as np
import pytest

from agent_envs import AgentEnvsError
from agent_envs.envs.synthetic.world import VARIANTS, make_question, make_world, vocabulary
from agent_envs.retrieval import Corpus, build_retriever
from tests.agent_envs.envs.playing import make

ID = "AgentR1/SyntheticMultiHop-v0"
ARITHMETIC = "AgentR1/SyntheticArithmetic-v0"
TABLE = "AgentR1/SyntheticTable-v0"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_facts_chain_to_the_answer_and_reference_queries_find_them(variant, hops):
    env = gym.make(ID, variant=variant, hops=hops, max_episode_steps=hops + 1)
    for seed in range(2):
        env.reset(seed=seed)
        total = sum(env.step(action)[1] for action in env.unwrapped.reference_actions())
        assert total == pytest.approx(1.2)  # exact match 1.0, all facts found 0.2
        rng = np.random.default_rng(seed)
        world = make_world(rng, variant=variant)
        words = {word for passage in world.passages for word in passage.text.split()}
        assert words <= set(vocabulary())
        retriever = build_retriever(Corpus(world.passages))
        question = make_question(world, rng, hops=hops)
        facts = [world.facts[i] for i in question.gold]
        assert len(facts) == hops
        assert facts[0].subject in question.text
        assert [fact.object for fact in facts[:-1]] == [fact.subject for fact in facts[1:]]
        assert facts[-1].object == question.answer
        keys = [(fact.relation, fact.subject) for fact in world.facts]
        assert len(set(keys)) == len(keys)  # one answer per relation and subject
        for query, gold in zip(question.queries, question.gold, strict=True):
            assert gold in [hit.index for hit in retriever.search(query, 2)]


def test_questions_start_from_given_kinds_with_enough_hops():
    kinds = {"film": 4, "person": 3, "company": 2, "city": 1}
    env = gym.make(ID, hops=[1, 2, 3], start=list(kinds))
    world = make_world(np.random.default_rng(0))
    kind_of = {relation: world.relations[relation].subject for relation in world.relations}
    seen = set()
    for task in range(80):
        env.reset(options={"task": task})
        (question,) = env.unwrapped.task.data["questions"]
        world = make_world(np.random.default_rng(task))
        kind = kind_of[world.facts[question.gold[0]].relation]
        assert len(question.gold) <= kinds[kind]
        seen.add((kind, len(question.gold)))
    assert seen == {(kind, hops) for kind in kinds for hops in (1, 2, 3) if hops <= kinds[kind]}


LONG = "AgentR1/SyntheticLongHorizon-v0"


def test_each_question_has_a_separate_conversation():
    env = make(LONG, task=5)
    questions = env.unwrapped.task.data["questions"]
    steps = [env.step(action) for action in env.unwrapped.reference_actions()]
    rewards = [step[1] for step in steps]
    observation, _, terminated, _, info = steps[2]
    assert observation == questions[1].text == info["messages"][1]["content"]
    assert len(info["messages"]) == 2
    assert (terminated, *steps[-1][2:4]) == (False, True, False)
    assert rewards[2] == rewards[5] == pytest.approx(1 / 3)
    assert sum(rewards) == pytest.approx(1.2)


def test_one_wrong_answer_costs_all_of_the_sparse_reward_and_a_third_of_the_other():
    for rewards, expected in (({"all_correct": 1.0}, 0.0), ({"exact_match": 1.0}, 2 / 3)):
        env = make(LONG, task=5, rewards=rewards)
        actions = env.unwrapped.reference_actions()
        actions[2] = env.unwrapped.write_answer("nobody")
        total = sum(env.step(action)[1] for action in actions)
        assert total == pytest.approx(expected)
        assert env.unwrapped.metrics()["success"] == 0.0
        assert env.unwrapped.metrics()["exact_match"] == pytest.approx(2 / 3)


def test_a_share_of_the_worlds_is_outdated():
    env = gym.make(ID, outdated=0.5).unwrapped
    num_outdated = 0
    for task in range(40):
        env.reset(options={"task": task})
        results = [env.step(action)[4] for action in env.reference_actions()]
        assert results[-1]["metrics"]["success"] == 1.0
        num_outdated += " was " in results[0]["tool_result"]
    assert 10 < num_outdated < 30


def test_each_task_draws_from_lists_of_arguments_and_snapshots_keep_the_draw():
    arguments = {"variant": ["default", "relations"], "top_k": [1, 3], "hops": [1, 2]}
    env, other = gym.make(ID, **arguments), gym.make(ID, **arguments)
    drawn = []
    for task in range(20):
        env.reset(options={"task": task})
        name = env.unwrapped.task.data["questions"][0].queries[-1].split()[0]
        snapshot = env.unwrapped.snapshot()
        other.reset(options={"task": 0})
        other.unwrapped.restore(snapshot)
        search = env.unwrapped.reference_actions()[0]
        shown = [each.step(search)[0].splitlines() for each in (env, other)]
        lengths = {sum(line.startswith("[") for line in lines) for lines in shown}
        drawn.append((name in VARIANTS["relations"], *lengths))
    assert set(drawn) == {(novel, length) for novel in (False, True) for length in (1, 3)}


@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [
        (TABLE, {"steps": 4}, "steps must be 1 to 3, not 4"),
        (ID, {"top_k": [2, 0]}, "top_k must be at least 1, not 0"),
        (ID, {"variant": ["default", "injected"]}, "cannot be mixed"),
        (ID, {"variant": ["default", "paraphrased"]}, "Unknown variant 'paraphrased'"),
        (ID, {"hops": [2, 9]}, "hops"),
        (ID, {"outdated": 1.5}, "outdated"),
        (ID, {"start": "company", "hops": 3}, "start="),
        # whose world knows no companies
        (ID, {"start": "company", "hops": 1, "variant": ["default", "relations"]}, "'relations'"),
        (ID, {"start": ["film", "persn"]}, r"start 'persn'.*person"),
    ],
)
def test_wrong_arguments_are_errors(env_id, arguments, message):
    with pytest.raises(AgentEnvsError, match=message):
        gym.make(env_id, **arguments)


@pytest.mark.parametrize(
    ("env_id", "steps"), [(ARITHMETIC, 1), (ARITHMETIC, 8), (TABLE, 1), (TABLE, 3)]
)
def test_the_calls_lead_to_the_answer_and_each_value_earns_once(env_id, steps):
    env = gym.make(env_id, steps=steps, max_episode_steps=20)
    for task in range(20):
        question, _ = env.reset(options={"task": task})
        if env_id == ARITHMETIC:
            expression = question.removeprefix("What is ").removesuffix("?")
            assert str(eval(expression)) == env.unwrapped.task.answers[0]
        *calls, answer = env.unwrapped.reference_actions()
        assert len(calls) == steps
        rewards = [env.step(call)[1] for call in calls]
        assert sum(rewards) == pytest.approx(0.2)
        assert env.step(calls[0])[1] == 0.0
        assert env.step(answer)[4]["metrics"]["success"] == 1.0
