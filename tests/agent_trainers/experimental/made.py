"""Trajectories made by hand."""

import numpy as np

from agent_trainers.trajectory import StopReason, Trajectory, Transition

QUESTION = ({"role": "user", "content": "q"},)


def transition(prompt, completion, reward=0.0, messages=QUESTION, info=None):
    return Transition(
        messages=list(messages), prompt_ids=prompt, completion_ids=completion,
        logprobs=np.zeros(len(completion), np.float32), action="a", reward=reward,
        reward_terms={}, terminated=False, truncated=False, info=info or {},
    )  # fmt: skip


def trajectory(task, *transitions, success=0.0, start=0, stop_reason=StopReason.ANSWERED):
    return Trajectory(
        task_id=task, group_id=task, transitions=list(transitions), metrics={"success": success},
        timings={}, stop_reason=stop_reason, start=start,
    )  # fmt: skip
