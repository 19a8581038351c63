"""Trajectories made by hand."""

import numpy as np

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
