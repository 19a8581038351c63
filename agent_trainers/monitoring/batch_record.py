"""What became of a batch, token by token: rows, mask, advantage, value, probability ratio."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_trainers.batching.rows import Row
from agent_trainers.trajectory import Trajectory

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The rows of this process's share of a generation batch, and what the trainer made of them."""

    trajectories: Sequence[Trajectory]
    """What was played; `Row.episode` counts in it."""
    rows: Sequence[Row]
    """Its rows, without padding rows."""
    tensors: Mapping[str, Any]
    """The batch as it is trained, (B, ...): the rows in order, then padding rows."""
    advantages: Sequence[Floats] = ()
    """Of each trajectory, as the estimator gave them: per step, or per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The action tokens of one step, each list of shape (len(completion_ids),)."""

    row: int
    """Which of its trajectory's rows the step is in, from 0."""
    fork_reason: str | None
    """Why the step begins a row although it is not the first; None where it does not."""
    is_trained: list[bool]
    """Whether the policy learns from the token."""
    advantages: list[float]
    """What the token was trained with."""
    values: list[float] | None
    """The critic's value before the token; None without a critic."""
    ratios: list[float] | None
    """Probability of the token in the policy after the update over that when it was sampled; None
    where nobody computed it."""


def step_tokens(
    record: BatchRecord, episode: int, new_logprobs: npt.NDArray[Any] | None = None
) -> list[StepTokens]:
    """Return the action tokens of each step of a trajectory, as they were trained.

    Args:
        record: The batch.
        episode: Number of the trajectory in it.
        new_logprobs: Log-probabilities of the policy to compare the sampled ones with, (B, T).
    """
    advantages = _numbers(record.tensors.get("advantages"))
    values = _numbers(record.tensors.get("old_values"))
    trajectory = record.trajectories[episode]
    # A turn of no tokens has nothing to train.
    nothing = StepTokens(
        row=0, fork_reason=None, is_trained=[], advantages=[], values=None, ratios=None
    )
    steps = [nothing] * len(trajectory.transitions)
    own = [(i, row) for i, row in enumerate(record.rows) if row.episode == episode]
    for number, (i, row) in enumerate(own):
        row_steps, is_action = np.array(row.steps), np.array(row.is_action, bool)
        for step in dict.fromkeys(row_steps[is_action].tolist()):
            at = np.flatnonzero((row_steps == step) & is_action)  # positions in the row
            steps[step] = StepTokens(
                row=number,
                fork_reason=row.fork_reason if step == row.steps[0] else None,
                is_trained=np.array(row.is_trained, bool)[at].tolist(),
                advantages=[0.0] * len(at) if advantages is None else advantages[i, at].tolist(),
                values=None if values is None else values[i, at].tolist(),
                ratios=None
                if new_logprobs is None
                else np.exp(new_logprobs[i, at] - np.array(row.logprobs)[at]).tolist(),
            )
    return steps


def _numbers(tensor: Any) -> Floats | None:
    return None if tensor is None else tensor.detach().float().cpu().numpy()
