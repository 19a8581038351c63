"""From transitions to tensors: one row per step, steps that extend each other merged.

A row is a prompt and a completion. Where the state of a step begins with the whole of the row so
far (state and action of the step before, token by token), the step joins that row: what the
environment added in between is part of the completion but not trained. Merging saves work and
changes no gradient, because attention is causal and the loss counts trained tokens, not rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from agent_trainers.trajectory import StopReason, Trajectory, Transition


@dataclass(slots=True)
class Row:
    """One training sequence. The lists after `prompt_ids` have shape (T,)."""

    prompt_ids: list[int]
    """The state of the row's first step; at least one token."""
    completion_ids: list[int] = field(default_factory=list)
    """Actions, and what the environment said between them."""
    is_trained: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token and learns from it."""
    advantages: list[float] = field(default_factory=list)
    """The advantage of the token's step; 0 where not trained."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability when sampled; 0 where not sampled."""

    def can_take(self, transition: Transition) -> bool:
        """Say whether the state of `transition` begins with the whole of this row."""
        head = transition.prompt_ids[: len(self.prompt_ids)]
        length = len(self.prompt_ids) + len(self.completion_ids)
        return (
            head == self.prompt_ids
            and transition.prompt_ids[len(self.prompt_ids) : length] == self.completion_ids
            and len(transition.prompt_ids) >= length
        )

    def take(self, transition: Transition, advantage: float, *, is_trained: bool) -> None:
        """Append a step whose state begins with the whole of this row."""
        between = transition.prompt_ids[len(self.prompt_ids) + len(self.completion_ids) :]
        self._extend(between, [0.0] * len(between), 0.0, is_trained=False)
        logprobs = transition.logprobs.tolist()
        self._extend(
            transition.completion_ids,
            logprobs,
            advantage if is_trained else 0.0,
            is_trained=is_trained,
        )

    def _extend(
        self, ids: Sequence[int], logprobs: list[float], advantage: float, *, is_trained: bool
    ) -> None:
        self.completion_ids.extend(ids)
        self.is_trained.extend([is_trained] * len(ids))
        self.advantages.extend([advantage] * len(ids))
        self.logprobs.extend(logprobs)


def make_rows(
    trajectory: Trajectory,
    advantages: Sequence[float] | npt.NDArray[np.float32],
    *,
    merge: bool = True,
    train_truncated: bool = True,
) -> list[Row]:
    """Turn one trajectory into rows.

    Args:
        trajectory: A trajectory that could be scored.
        advantages: One per transition, shape (S,).
        merge: Join steps that extend each other; False gives a row per step.
        train_truncated: Whether turns that were cut off by the token limit are trained.
    """
    rows: list[Row] = []
    for transition, advantage in zip(trajectory.transitions, advantages, strict=True):
        if not (merge and rows and rows[-1].can_take(transition)):
            rows.append(Row(prompt_ids=list(transition.prompt_ids)))
        is_cut = (
            transition is trajectory.transitions[-1]
            and trajectory.stop_reason is StopReason.TOKEN_LIMIT
        )
        rows[-1].take(transition, float(advantage), is_trained=train_truncated or not is_cut)
    return [row for row in rows if any(row.is_trained)]


def padding_row(pad_token_id: int) -> Row:
    """Return a row that trains nothing and weighs nothing."""
    return Row([pad_token_id], [pad_token_id], [False], [0.0], [0.0])


def num_rows_per_rank(num_rows: Sequence[int], num_splits: int) -> int:
    """Return how many rows every rank must hold.

    As many as the fullest rank has, rounded up to a multiple of `num_splits`, because TRL's
    ``split_tensor_dict`` floors: an uneven tail would be dropped without a word.

    Args:
        num_rows: Rows of each rank.
        num_splits: Micro-batches that the rows are split into.
    """
    return max(1, math.ceil(max(num_rows) / num_splits)) * num_splits


def collate(
    rows: Sequence[Row], pad_token_id: int, pad_to_multiple_of: int | None = None
) -> dict[str, torch.Tensor]:
    """Pad rows to tensors, under the names of TRL's GRPO batch.

    Args:
        rows: B rows.
        pad_token_id: Fills prompts on the left and completions on the right.
        pad_to_multiple_of: Round both widths up to a multiple of this.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` of shape (B, P), int64; ``completion_ids`` and
        ``completion_mask`` (B, T), int64; ``tool_mask`` (B, T), int64, 1 where a token is trained;
        ``advantages`` and ``sampling_per_token_logps`` (B, T), float32.
    """
    prompt_width = _width([len(row.prompt_ids) for row in rows], pad_to_multiple_of)
    width = _width([len(row.completion_ids) for row in rows], pad_to_multiple_of)

    def right(
        values: Sequence[float | int | bool], fill: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.tensor([*values, *[fill] * (width - len(values))], dtype=dtype)

    def left(values: Sequence[int], fill: int) -> torch.Tensor:
        return torch.tensor([*[fill] * (prompt_width - len(values)), *values])

    long, real = torch.long, torch.float32
    return {
        "prompt_ids": torch.stack([left(row.prompt_ids, pad_token_id) for row in rows]),
        "prompt_mask": torch.stack([left([1] * len(row.prompt_ids), 0) for row in rows]),
        "completion_ids": torch.stack(
            [right(row.completion_ids, pad_token_id, long) for row in rows]
        ),
        # Padding rows keep one token to attend to: a row of nothing gives NaN in some kernels.
        "completion_mask": torch.stack(
            [right([1] * len(row.completion_ids), 0, long) for row in rows]
        ),
        "tool_mask": torch.stack([right(row.is_trained, 0, long) for row in rows]),
        "advantages": torch.stack([right(row.advantages, 0.0, real) for row in rows]),
        "sampling_per_token_logps": torch.stack([right(row.logprobs, 0.0, real) for row in rows]),
    }


def trim(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the columns in which every row of a micro-batch is padding.

    TRL pads a whole generation batch to its longest row before it splits it.
    """
    prompt_width = max(1, int(batch["prompt_mask"].sum(dim=1).max()))
    width = max(1, int(batch["completion_mask"].sum(dim=1).max()))
    total = batch["completion_mask"].size(1)
    trimmed = {}
    for name, tensor in batch.items():
        if name.startswith("prompt_"):
            trimmed[name] = tensor[:, -prompt_width:]
        elif tensor.dim() == 2 and tensor.size(1) == total:
            trimmed[name] = tensor[:, :width]
        else:
            trimmed[name] = tensor
    return trimmed


def _width(lengths: Sequence[int], multiple: int | None) -> int:
    width = max(lengths)
    return width if not multiple else math.ceil(width / multiple) * multiple
