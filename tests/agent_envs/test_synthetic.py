import hashlib
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.envs.synthetic_world import VARIANTS, make_question, make_world, vocabulary
from agent_envs.retrieval import Corpus, build_retriever

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_the_reference_queries_find_their_facts_among_the_first_two(variant, hops):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        world = make_world(rng, variant=variant)
        retriever = build_retriever(Corpus(world.passages))
        question = make_question(world, rng, hops=hops)
        assert len(question.gold) == hops
        for query, gold in zip(question.queries, question.gold, strict=True):
            assert gold in [hit.index for hit in retriever.search(query, 2)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chain_leads_from_the_question_to_the_only_answer(variant):
    rng = np.random.default_rng(1)
    world = make_world(rng, variant=variant)
    question = make_question(world, rng, hops=3)
    facts = [world.facts[i] for i in question.gold]
    assert facts[0].subject in question.text
    assert [fact.object for fact in facts[:-1]] == [fact.subject for fact in facts[1:]]
    assert facts[-1].object == question.answer
    keys = [(fact.relation, fact.subject) for fact in world.facts]
    assert len(set(keys)) == len(keys)  # one answer per relation and subject


def test_worlds_use_the_words_of_the_vocabulary_only():
    known = set(vocabulary())
    for variant in VARIANTS:
        world = make_world(np.random.default_rng(0), variant=variant)
        words = {word for passage in world.passages for word in passage.text.split()}
        assert words <= known


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_reference_actions_earn_the_full_reward(variant, hops):
    env = gym.make(ID, variant=variant, hops=hops, max_episode_steps=hops + 1)
    for seed in range(5):
        env.reset(seed=seed)
        total = sum(env.step(action)[1] for action in env.unwrapped.reference_actions())
        assert total == pytest.approx(1.2)  # exact match 1.0, all facts found 0.2


def test_training_and_test_worlds_are_apart():
    questions = {
        split: {gym.make(ID, split=split).reset(options={"task": i})[0] for i in range(50)}
        for split in ("train", "test")
    }
    first = {split: gym.make(ID, split=split).unwrapped._first_seed for split in questions}
    assert first["test"] - first["train"] >= 2**31
    assert questions["train"] != questions["test"]


def test_other_relations_share_no_words_of_relation_with_the_trained_ones():
    assert not set(VARIANTS["default"]) & set(VARIANTS["relations"])


EPISODE = """
import hashlib, json, gymnasium as gym, agent_envs
env = gym.make("AgentR1/SyntheticMultiHop-v0")
log = [env.reset(seed=7)]
log += [env.step(action) for action in [*env.unwrapped.reference_actions()[:2], "hm"]]
print(hashlib.sha256(json.dumps(log).encode()).hexdigest())
"""


def test_an_episode_is_the_same_bytes_in_processes_with_other_hash_seeds():
    digests = {
        subprocess.run(
            [sys.executable, "-c", EPISODE],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "424242")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == hashlib.sha256().digest_size * 2
