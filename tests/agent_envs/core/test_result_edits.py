"""Adversarial edits of tool results."""

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.core.result_edits import MAX_EDIT_CHARS, Edit, apply_edit, swap_values
from agent_envs.errors import ConfigurationError, UnknownNameError

TEXT = (
    "[1] Oslo\nOslo is the capital of Norway. It was founded in 1040.\n[2] Bergen\nHe met Ada Holm."
)


def run(task=0, **kwargs):
    env = gym.make("AgentR1/SyntheticMultiHop-v0", **kwargs)
    env.reset(seed=0, options={"task": task})
    steps = [env.step(action) for action in env.unwrapped.reference_actions()]
    return [step[0] for step in steps], [step[1] for step in steps], steps[-1][-1]["metrics"]


def insert_always(question, text, rng):
    return [Edit(".", "..."), Edit("the", "no"), Edit("is", "was")]


def test_an_edit_changes_whole_words_once():
    assert apply_edit("an ant and an ant", Edit("ant", "bee")) == "an bee and an ant"
    assert apply_edit("antler", Edit("ant", "bee")) == "antler"
    assert apply_edit("an ant", Edit("ant", "b" * (MAX_EDIT_CHARS + 1))) == "an ant"
    assert apply_edit("an ant", Edit("", "b")) == "an ant"
    assert apply_edit("an ant", Edit("ant", r"\1")) == r"an \1"


@pytest.mark.parametrize("seed", range(5))
def test_swapped_values_are_those_that_are_not_in_the_question(seed):
    values = {"Norway", "1040", "Holm"}
    (swapped,) = swap_values("what is Oslo ?", TEXT, np.random.default_rng(seed))
    assert swapped.old != swapped.new
    assert {swapped.old, swapped.new} <= values


def test_an_attacked_episode_has_other_results_and_equal_rewards():
    plain, rewards, _ = run()
    edited, again, metrics = run(attack={"attacker": "swap", "budget": 1})
    assert (again, metrics["num_edits"]) == (rewards, 1.0)
    assert edited[0] != plain[0]
    assert edited[1:] == plain[1:]  # the budget is spent
    assert run(attack={"attacker": "swap", "budget": 1})[0] == edited


def test_the_budget_limits_custom_attackers_and_is_in_snapshots():
    attack = {"attacker": f"{__name__}:insert_always", "budget": 2}
    assert run(attack=attack)[2]["num_edits"] == 2.0
    assert run(attack={"budget": 0})[0] == run()[0]
    env = gym.make("AgentR1/SyntheticMultiHop-v0", attack={"budget": 1})
    env.reset(seed=0, options={"task": 0})
    first, second, _ = env.unwrapped.reference_actions()
    start = env.unwrapped.snapshot()
    shown = env.step(first)[0]
    after = env.unwrapped.snapshot()
    env.unwrapped.restore(start)
    assert env.step(first)[0] == shown
    env.unwrapped.restore(after)
    assert env.step(second)[-1]["metrics"]["num_edits"] == 1.0


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        ({"attacker": "swop"}, UnknownNameError),
        ({"budgets": 1}, UnknownNameError),
        ({"budget": -1}, ConfigurationError),
        ({"budget": True}, ConfigurationError),
    ],
)
def test_a_wrong_attack_is_refused(attack, error):
    with pytest.raises(error):
        gym.make("AgentR1/SyntheticMultiHop-v0", attack=attack)


def test_a_number_longer_than_an_edit_is_unchanged():
    digits = "12" * 5_000  # more than Python turns into a number
    for edit in swap_values("How many?", digits, np.random.default_rng(0)):
        assert apply_edit(digits, edit) == digits
