"""Trajectories and episodes made by hand."""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np

from agent_trainers.policies.policy import GenerationRequest
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory, Transition


def transition(prompt_ids=(1,), completion_ids=(2,), reward=0.0, **changes):
    settings = {
        "messages": [{"role": "user", "content": "Who?"}], "prompt_ids": list(prompt_ids),
        "completion_ids": list(completion_ids), "action": "a", "reward": reward, "info": {},
        "logprobs": np.zeros(len(completion_ids), np.float32), "reward_terms": {},
        "terminated": False, "truncated": False,
    }  # fmt: skip
    return Transition(**(settings | changes))


def trajectory(*transitions, **changes):
    settings = {
        "task_id": "t", "group_id": "g", "transitions": list(transitions), "metrics": {},
        "timings": {}, "stop_reason": StopReason.ANSWERED,
    }  # fmt: skip
    return Trajectory(**(settings | changes))


def request(number=0, content="where ?", **changes):
    """Return what a policy is asked, with the generator of this number."""
    settings = {
        "episode_id": number, "messages": [{"role": "user", "content": content}], "tools": None,
        "previous": None, "rng": np.random.default_rng(number),
    }  # fmt: skip
    return GenerationRequest(**(settings | changes))


def roll_out(policy, tasks, **env_kwargs):
    """Play questions of several hops, one episode per entry of `tasks`, grouped by task."""
    specs = [
        EpisodeSpec(task=task, seed=task, group_id=str(task), rng=np.random.default_rng([7, i]))
        for i, task in enumerate(tasks)
    ]
    rollout = Rollout(lambda: gym.make("AgentR1/SyntheticMultiHop-v0", **env_kwargs), policy)
    return rollout.collect(specs)


@dataclass
class Episode:
    """What estimators read; by default each step has one token and an observation of its own."""

    group_id: str
    rewards: list
    states: list = None
    start: int = 0
    is_scorable: bool = True
    is_truncated: bool = False
    lengths: list = None
    anchors: list = None
    reward_terms: list = None

    def __post_init__(self):
        self.lengths = self.lengths or [1] * len(self.rewards)
        self.anchors = self.anchors or list(range(len(self.rewards)))
        self.reward_terms = self.reward_terms or [{"reward": r} for r in self.rewards]
