import functools

import gymnasium as gym
import pytest
from tqdm import tqdm

from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.rollout import evaluation
from tests.agent_trainers.made import trajectory, transition


def test_a_policy_is_measured_where_progress_bars_are_off(monkeypatch):
    off = functools.partial(tqdm, disable=True)  # as TQDM_DISABLE=1 has it
    monkeypatch.setattr(evaluation, "tqdm", off)
    make_env = functools.partial(gym.make, "AgentR1/SyntheticArithmetic-v0")
    policy = ScriptedPolicy(lambda request: "<answer>none</answer>")
    measured = evaluation.evaluate_policy(make_env, policy, range(2))
    assert (len(measured.trajectories), measured.num_failed) == (2, 0)
    assert measured.metrics["success"] == pytest.approx(0.0)


class Recorded:
    """A rollout of recorded episodes."""

    def __init__(self, episodes):
        self.episodes = episodes

    def collect(self, specs, on_end):
        return self.episodes

    def close(self):
        pass


def test_the_interval_of_pass_at_1_is_that_of_success_and_none_leaves_the_unit_interval():
    outcomes = [[1, 1], [1, 1], [1, 1], [1, 0]]  # Student's t would reach to 1.27
    episodes = [
        trajectory(transition(), group_id=str(task), metrics={"success": float(solved)})
        for task, both in enumerate(outcomes)
        for solved in both
    ]
    found = evaluation.evaluate(Recorded(episodes), range(4), samples_per_task=2, ks=(1, 2))
    assert found.intervals["pass@1"] == found.intervals["success"]
    for low, high in found.intervals.values():
        assert 0.0 <= low <= high <= 1.0
    assert "pass@2" in found.intervals
