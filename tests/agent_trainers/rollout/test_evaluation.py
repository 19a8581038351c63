import functools

import gymnasium as gym
import pytest
from tqdm import tqdm

from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.rollout import evaluation


def test_a_policy_is_measured_where_progress_bars_are_off(monkeypatch):
    off = functools.partial(tqdm, disable=True)  # as TQDM_DISABLE=1 has it
    monkeypatch.setattr(evaluation, "tqdm", off)
    make_env = functools.partial(gym.make, "AgentR1/SyntheticArithmetic-v0")
    policy = ScriptedPolicy(lambda request: "<answer>none</answer>")
    measured = evaluation.evaluate_policy(make_env, policy, range(2))
    assert (len(measured.trajectories), measured.num_failed) == (2, 0)
    assert measured.metrics["success"] == pytest.approx(0.0)
