"""Tools that raise, hang and flood, environments that die, rewards that are NaN: training goes on
and every fault is counted."""

import collections
import functools
import math
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

from agent_envs.core.tool import Tool
from agent_trainers.rollout.environments import read_step
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer

ID = "AgentR1/SyntheticMultiHop-v0"
TOOL_TIMEOUT, STEP_TIMEOUT = 0.2, 2.0
TOOL_FAULTS = ("tool_error", "tool_timeout", "tool_result_cut")
ENV_FAULTS = ("environment_error", "environment_timeout")


class FaultCounter:
    """What went wrong, counted where it is brought about."""

    def __init__(self):
        self.counts = collections.Counter()
        self.kinds = collections.Counter()
        self._lock = threading.Lock()

    def add(self, fault, kind):
        with self._lock:
            self.counts[fault] += 1
            self.kinds[kind] += 1


class Faulty(gym.Wrapper):
    """Goes wrong at random steps."""

    def __init__(self, env, counter, seed, rate):
        super().__init__(env)
        self._counter, self._rate = counter, rate
        self._rng = np.random.default_rng(seed)
        search = env.unwrapped.tools["search"]
        self._search = search.function
        faulty = Tool(
            self._faulty_search, name="search", timeout=TOOL_TIMEOUT, max_result_chars=500
        )
        env.unwrapped._tools["search"] = faulty
        self._tool_fault = None

    def _faulty_search(self, query: str):
        """Search.

        Args:
            query: What for.
        """
        fault, self._tool_fault = self._tool_fault, None
        if fault is None:
            return self._search(query)
        self._counter.add(fault, fault)
        if fault == "tool_error":
            raise RuntimeError("the index is gone")
        if fault == "tool_timeout":
            threading.Event().wait(60)
        return "flood " * 100_000

    def reset(self, *, seed=None, options=None):
        if self._rng.random() < self._rate / 4:
            self._counter.add("environment_error", "death at reset")
            raise ConnectionError("the server is gone")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._rng.random() < self._rate:
            kind = str(self._rng.choice(["raise", "hang", "nan", "infinite", "garbage"]))
            self._tool_fault = None
            if kind == "hang":
                self._counter.add("environment_timeout", kind)
                threading.Event().wait(60)
            self._counter.add("environment_error", kind)
            if kind == "raise":
                raise RuntimeError("the environment died")
            if kind == "garbage":
                return None
            observation, _, terminated, truncated, info = super().step(action)
            reward = math.nan if kind == "nan" else math.inf
            return observation, reward, terminated, truncated, info
        self._tool_fault = None
        if self._rng.random() < 2 * self._rate:
            self._tool_fault = str(self._rng.choice(TOOL_FAULTS))
        return super().step(action)


@pytest.fixture
def make_trainer(make_trainer):
    settings = {"max_steps": 6, "per_device_train_batch_size": 16, "num_generations": 4}
    return functools.partial(make_trainer, step_timeout=STEP_TIMEOUT, **settings)


def is_finite(trainer):
    return all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


def test_training_goes_on_through_all_faults_and_every_one_is_counted(make_trainer):
    counter = FaultCounter()

    def make_env():
        made["envs"] += 1
        if made["envs"] % 10 == 0:
            counter.add("environment_error", "not made")
            raise OSError("no environment to be had")
        return Faulty(gym.make(ID), counter, seed=made["envs"], rate=0.12)

    made = collections.Counter()
    trainer = make_trainer(make_env)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 6
    logged = {
        fault: sum(entry[f"faults/{fault}"] for entry in entries)
        for fault in (*TOOL_FAULTS, *ENV_FAULTS)
    }
    assert logged == {fault: counter.counts[fault] for fault in logged}
    happened = {
        "raise", "hang", "nan", "infinite", "garbage", "not made", "death at reset", *TOOL_FAULTS,
    }  # fmt: skip
    assert set(counter.kinds) == happened
    # the shares of episodes that failed are those counts: 16 episodes a step
    failed = sum(entry["episodes/environment_error"] + entry["episodes/timeout"]
                 for entry in entries)  # fmt: skip
    assert failed * 16 == pytest.approx(sum(counter.counts[fault] for fault in ENV_FAULTS))
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    assert is_finite(trainer)


class Dead(gym.Wrapper):
    """Every step fails."""

    def step(self, action):
        raise ConnectionError("the server is gone")


class NotANumber(gym.RewardWrapper):
    """Every reward is NaN."""

    def reward(self, reward):
        return math.nan


@pytest.mark.parametrize(
    ("wrapper", "kind", "estimator"),
    [
        (Dead, StepGRPOTrainer, "gigpo"),
        (NotANumber, StepGRPOTrainer, "reinforce_pp"),
        (Dead, StepPPOTrainer, "gae_step"),
    ],
)
def test_a_batch_in_which_everything_fails_changes_no_weight(
    make_trainer, wrapper, kind, estimator
):
    trainer = make_trainer(
        lambda: wrapper(gym.make(ID)), kind, max_steps=2, per_device_train_batch_size=4,
        advantage_estimator=estimator, beta=0.1, max_fault_share=None,
    )  # fmt: skip
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["faults/environment_error"] for entry in entries] == [4, 4]
    assert [entry["episodes/unscorable"] for entry in entries] == [1.0, 1.0]
    assert [entry["loss"] for entry in entries] == [0.0, 0.0]
    for one, other in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_ends_the_task_needs_no_state():
    assert read_step(("", 1.0, True, False, {"messages": []})).terminated
    with pytest.raises(TypeError, match="messages"):
        read_step(("", 1.0, False, False, {"messages": []}))
