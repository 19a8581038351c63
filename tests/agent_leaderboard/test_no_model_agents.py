"""Agents without a model: floor, rules and ceiling."""

import functools

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import Task, Tool, ToolEnv
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import build_agent
from agent_leaderboard.agents.heuristics import constant_program, extract_answer, next_action
from agent_trainers.rollout.episode import EpisodeSpec

HITS = (
    "[1] Red Harbor\nRed Harbor is a 1961 film. It was directed by Ada Holm on 3 May 1960.\n"
    "[2] Ada Holm\nAda Holm was born in Norway. She made 12 films."
)


def run_agent(kind, name, num_tasks=6, seed=0, **kwargs):
    make_env = functools.partial(gym.make, f"AgentR1/{name}-v0", **kwargs)
    specs = [
        EpisodeSpec(task=i, seed=seed + i, group_id=str(i), rng=np.random.default_rng(seed + i))
        for i in range(num_tasks)
    ]
    return [episode.trajectory for episode in build_agent(kind, {}).play(make_env, specs)]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SyntheticMultiHop", {}),
        ("SyntheticLongHorizon", {}),
        ("SyntheticArithmetic", {"steps": 4}),
        ("SyntheticTable", {"tool_format": "tags"}),
        ("ReasoningGym", {}),
    ],
)
def test_the_oracle_solves_every_task(name, kwargs):
    assert all(trajectory.success for trajectory in run_agent("oracle", name, **kwargs))


@pytest.mark.parametrize("name", ["HotpotQA", "MuSiQue", "GSM8K", "MATH", "HumanEval", "MBPP"])
@pytest.mark.parametrize("kind", ["oracle", "heuristic", "random"])
def test_every_agent_plays_every_kind_of_data_set(name, kind, data_files, strong_sandbox):
    (trajectory,) = run_agent(kind, name, num_tasks=1, data=data_files[f"AgentR1/{name}-v0"])
    assert trajectory.is_scorable
    assert trajectory.success or kind != "oracle"
    assert trajectory.metrics["num_invalid_actions"] == 0 or name in ("GSM8K", "MATH")


class ToolOfTask(ToolEnv):
    """Task n has one tool, whose name is ``tool_n``."""

    num_tasks = 3

    def get_task(self, index):
        return Task(id=str(index), question="?", answers=("a",))

    def begin_episode(self):
        def look() -> str:
            """Look."""
            return "nothing"

        self.offer_tools([Tool(look, name=f"tool_{self.task_index}")])


def test_random_calls_are_those_of_the_tools_of_the_task():
    rng = np.random.default_rng
    specs = [EpisodeSpec(task=i % 3, seed=i, group_id=str(i), rng=rng(i)) for i in range(9)]
    episodes = build_agent("random", {}).play(ToolOfTask, specs)
    assert all(each.trajectory.metrics["num_invalid_actions"] == 0 for each in episodes)


def test_random_actions_are_valid_varied_and_given_by_the_seed():
    one, again, other = (run_agent("random", "SyntheticTable", seed=seed) for seed in (1, 1, 2))
    actions = [[step.action for step in trajectory.transitions] for trajectory in one]
    assert actions == [[step.action for step in t.transitions] for t in again]
    assert actions != [[step.action for step in t.transitions] for t in other]
    assert all(trajectory.metrics["num_invalid_actions"] == 0 for trajectory in one)
    assert len({len(turns) for turns in actions}) > 1


def test_rules_solve_what_reads_like_a_formula_or_a_chain():
    for name in ("SyntheticArithmetic", "SyntheticTable"):
        assert all(trajectory.success for trajectory in run_agent("heuristic", name))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What year was Red Harbor released?", "1961"),
        ("When was Red Harbor directed?", "3 May 1960"),
        ("Who directed Red Harbor?", "Ada Holm"),
        ("In which country was Ada Holm born?", "Norway"),
        ("How many films did Ada Holm make?", "12"),
        ("Are Red Harbor and Blue Harbor films?", "yes"),
        ("Which came first, Blue Harbor or Red Harbor?", "Red Harbor"),
    ],
)
def test_an_answer_of_the_kind_that_is_asked_for_is_taken_from_the_best_sentence(question, answer):
    assert extract_answer(question, HITS) == answer


def test_text_without_names_gives_the_words_that_the_question_lacks():
    text = "[1] red harbor\nthe director of red harbor is ada holm ."
    assert extract_answer("who is the director of red harbor ?", text) == "ada holm"
    assert extract_answer("who?", "") == "unknown"


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ('def f(x):\n    """\n    >>> f(3)\n    [1, 2]\n    """\n', "[1, 2]"),
        ("def f(x):\n    '''f(3) ➞ 'ab' in words'''\n", "'ab'"),
        ("Write it.\nYour program must pass this test:\nassert f(1, 2) == {3: 4}", "{3: 4}"),
        ("Write it.\nassert set(f((1, 2))) == (3, 4)", "(3, 4)"),
        ("def g():\n    pass\ndef f(x):\n", "None"),
    ],
)
def test_a_program_returns_what_the_example_shows(question, value):
    assert constant_program(question) == f"def f(*arguments, **options):\n    return {value}\n"


@pytest.mark.parametrize(
    ("question", "expression"),
    [
        ("What is (3 + 4) * 2?", "(3 + 4) * 2"),
        ("Each of 3 children has 4 balls.", "3 * 4"),
        ("He had 1,200 and 30 are left?", "1200 - 30"),
        ("There are 3 cats and 4 dogs.", "3 + 4"),
        ("Who?", "0"),
    ],
)
def test_the_calculator_gets_the_formula_or_the_numbers(question, expression, data_files):
    env = gym.make("AgentR1/GSM8K-v0", data=data_files["AgentR1/GSM8K-v0"]).unwrapped
    assert next_action(env, question, []) == env.write_call("calculator", expression=expression)
    assert next_action(env, question, ["7"]) == env.write_answer("7")


def test_a_setting_is_refused():
    with pytest.raises(ConfigurationError, match="'oracle' has no settings, not model"):
        build_agent("oracle", {"model": "x"})
