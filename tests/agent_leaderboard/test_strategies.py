"""What the strategies ask a model, and what they make of its replies."""

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_leaderboard.agents.strategies import SearchStrategy, short_answer
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec

HERMES = TOOL_FORMATS["hermes"]


class Model:
    """Replies one after the other; remembers what it was asked."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []
        self.policy = ScriptedPolicy(self.reply)

    def reply(self, request):
        self.asked.append(list(request.messages))
        return self.replies[len(self.asked) - 1]


def run_agent(strategy, env_id="AgentR1/HotpotQA-v0", **kwargs):
    """Play the first task; return its trajectory."""
    rollout = Rollout(lambda: gym.make(env_id, **kwargs), strategy)
    spec = EpisodeSpec(task=0, seed=0, group_id="0", rng=np.random.default_rng(0))
    (trajectory,) = rollout.collect([spec])
    rollout.close()
    return trajectory


def queries(trajectory):
    actions = [step.info["action"] for step in trajectory.transitions]
    return [action["arguments"]["query"] for action in actions if action["kind"] == "tool_call"]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_strategies_act_in_the_environments_tool_format(tool_format, hotpot_file):
    strategy = SearchStrategy(Model("Mara Quill").policy, TOOL_FORMATS[tool_format])
    trajectory = run_agent(strategy, data=hotpot_file, tool_format=tool_format)
    kinds = [step.info["action"]["kind"] for step in trajectory.transitions]
    assert kinds == ["tool_call", "answer"]


@pytest.mark.parametrize(
    ("replies", "searched", "answer"),
    [
        (["Answer: Mara Quill"], ["{}"], "Mara Quill"),
        (["It may be Dorn.", "Quill wrote it. So the answer is: Mara Quill."],
         ["{}", "It may be Dorn. {}"], "Mara Quill."),
    ],
)  # fmt: skip
def test_rag_searches_with_its_last_answer_and_the_question(hotpot_file, replies, searched, answer):
    model = Model(*replies)
    strategy = SearchStrategy(model.policy, HERMES, iterations=len(replies))
    *searches, last = run_agent(strategy, data=hotpot_file).transitions
    question = searches[0].messages[-1]["content"]
    asked = [step.info["action"]["arguments"]["query"] for step in searches]
    assert asked == [query.format(question) for query in searched]
    assert last.info["action"]["answer"] == answer
    for step, messages in zip(searches, model.asked, strict=True):
        assert step.info["tool_result"] in messages[-1]["content"]
        assert question in messages[-1]["content"]


def test_an_empty_reply_is_a_mistake_and_the_model_is_asked_again(hotpot_file):
    model = Model("", "Mara Quill")
    trajectory = run_agent(SearchStrategy(model.policy, HERMES), data=hotpot_file)
    kinds = [step.info["action"]["kind"] for step in trajectory.transitions]
    assert kinds == ["tool_call", "invalid", "answer"]
    assert model.asked[0] == model.asked[1]


def test_each_question_of_an_episode_with_several_begins_anew():
    model = Model(*["x"] * 3)
    strategy = SearchStrategy(model.policy, HERMES)
    asked = queries(run_agent(strategy, "AgentR1/SyntheticLongHorizon-v0", split="test"))
    assert len(set(asked)) == 3
    for query, messages in zip(asked, model.asked, strict=True):
        assert query in messages[-1]["content"]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Paris", "Paris"),
        ("Answer: Paris\nbecause", "Paris"),
        ("The answer is: Paris", "Paris"),
        ("I think <answer>Paris</answer>", "Paris"),
        ("answering machines", "answering machines"),
        ("", ""),
    ],
)
def test_the_answer_is_read_out_of_a_reply(reply, answer):
    assert short_answer(reply) == answer
