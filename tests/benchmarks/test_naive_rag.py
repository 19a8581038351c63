import gymnasium as gym
import pytest
from transformers import AutoModelForCausalLM

from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.evaluation import evaluate_policy
from benchmarks.learning_run import LONG_HORIZON, TINY_POLICY, load_tokenizer
from benchmarks.naive_rag import NaiveRAG


@pytest.fixture(scope="module")
def played():
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    policy = transformers_policy(model, load_tokenizer(), max_new_tokens=24)
    rag = NaiveRAG(policy, load_tokenizer())
    evaluation = evaluate_policy(lambda: gym.make(LONG_HORIZON, split="test"), rag, range(10))
    return evaluation.trajectories


def test_it_searches_once_with_the_question_and_then_answers(played):
    for trajectory in played:
        kinds = [transition.info["action"]["kind"] for transition in trajectory.transitions]
        assert kinds == ["tool_call", "answer"] * 3
        search = trajectory.transitions[0]
        assert search.messages[-1]["content"] in search.action


def test_the_model_reads_the_search_and_what_it_found(played):
    tokenizer = load_tokenizer()
    for trajectory in played:
        search, answer = trajectory.transitions[:2]
        assert answer.prompt_ids[: len(search.prompt_ids)] == search.prompt_ids
        read = tokenizer.decode(answer.prompt_ids)
        question = search.messages[-1]["content"]
        assert read.count(question) == 2  # asked, and searched for
        assert answer.messages[-1]["content"].split()[-2] in read
