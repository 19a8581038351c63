"""From transitions to tensors: one row per step, steps that extend each other merged.

A row is a prompt and a completion. Where the state of a step begins with the whole of the row so
far (state and action of the step before, token by token), the step joins that row: what the
environment added in between is part of the completion but no action. Merging saves work and changes
no gradient, because attention is causal and the loss weighs tokens, steps or trajectories, not
rows.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from agent_trainers.trajectory import StopReason, Trajectory, Transition

DENOMINATORS: Final = ("token", "step", "trajectory")
UNMERGED: Final = "merge_steps is off"
CHANGED: Final = "the environment or the chat template wrote the past anew"


@dataclass(slots=True)
class Row:
    """One training sequence. The lists after `prompt_ids` have shape (T,)."""

    episode: int
    """Number of its trajectory in the batch of this process; -1 for padding."""
    prompt_ids: list[int]
    """The state of the row's first step; at least one token."""
    completion_ids: list[int] = field(default_factory=list)
    """Actions, and what the environment said between them."""
    steps: list[int] = field(default_factory=list)
    """The step of the token's action, in the trajectory; an observation has that of the action
    before it."""
    is_action: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token."""
    is_trained: list[bool] = field(default_factory=list)
    """Whether the policy learns from it."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability when sampled; 0 where not sampled."""
    fork_reason: str | None = None
    """Why the row begins in the midst of its trajectory; None where it begins with it."""

    def can_take(self, transition: Transition) -> bool:
        """Say whether the state of `transition` begins with the whole of this row."""
        head = transition.prompt_ids[: len(self.prompt_ids)]
        length = len(self.prompt_ids) + len(self.completion_ids)
        return (
            head == self.prompt_ids
            and transition.prompt_ids[len(self.prompt_ids) : length] == self.completion_ids
            and len(transition.prompt_ids) >= length
        )

    def take(
        self, transition: Transition, step: int, *, is_trained: bool, train_between: bool
    ) -> None:
        """Append a step whose state begins with the whole of this row."""
        between = transition.prompt_ids[len(self.prompt_ids) + len(self.completion_ids) :]
        silence = [0.0] * len(between)
        self._extend(between, step - 1, silence, is_action=False, is_trained=train_between)
        logprobs = transition.logprobs.tolist()
        self._extend(
            transition.completion_ids, step, logprobs, is_action=True, is_trained=is_trained
        )

    def _extend(
        self,
        ids: Sequence[int],
        step: int,
        logprobs: list[float],
        *,
        is_action: bool,
        is_trained: bool,
    ) -> None:
        self.completion_ids.extend(ids)
        self.steps.extend([step] * len(ids))
        self.is_action.extend([is_action] * len(ids))
        self.is_trained.extend([is_trained] * len(ids))
        self.logprobs.extend(logprobs)


def make_rows(
    trajectory: Trajectory,
    episode: int = 0,
    *,
    merge: bool = True,
    train_truncated: bool = True,
    train_observations: bool = False,
) -> list[Row]:
    """Turn one trajectory into rows.

    Args:
        trajectory: A trajectory that could be scored.
        episode: Its number in the batch.
        merge: Join steps that extend each other; False gives a row per step.
        train_truncated: Whether turns that were cut off by the token limit are trained.
        train_observations: Whether what the environment said inside a row is trained as well: only
            to show what the loss mask is good for.
    """
    rows: list[Row] = []
    for step, transition in enumerate(trajectory.transitions):
        if not (merge and rows and rows[-1].can_take(transition)):
            rows.append(Row(episode, list(transition.prompt_ids)))
            if step > 0:
                before = trajectory.transitions[step - 1].info
                rows[-1].fork_reason = fork_reason(before) if merge else UNMERGED
        is_cut = (
            transition is trajectory.transitions[-1]
            and trajectory.stop_reason is StopReason.TOKEN_LIMIT
        )
        rows[-1].take(
            transition,
            step,
            is_trained=train_truncated or not is_cut,
            train_between=train_observations,
        )
    return [row for row in rows if row.completion_ids]


def fork_reason(info: Mapping[str, Any]) -> str:
    """Say why a state did not extend the one before.

    Args:
        info: What the environment said with the state.
    """
    reason = info.get("context", {}).get("reason")
    return f"the context policy changed it: {reason}" if reason else CHANGED


def state_row(prompt_ids: Sequence[int], pad_token_id: int) -> Row:
    """Return a row that only asks for the value of a state, at its one token; trains nothing."""
    return Row(-1, list(prompt_ids), [pad_token_id], [0], [False], [False], [0.0])


def padding_row(pad_token_id: int) -> Row:
    """Return a row that trains nothing and weighs nothing."""
    return state_row([pad_token_id], pad_token_id)


def loss_weights(rows: Sequence[Row], denominator: str) -> list[npt.NDArray[np.float64]]:
    """Return what each token weighs, not yet divided by the sum over the batch.

    ``token``: every trained token the same. ``step``: every step the same, its tokens share.
    ``trajectory``: every trajectory the same, its tokens share.

    Args:
        rows: All rows of each trajectory that has any.
        denominator: One of `DENOMINATORS`: what counts as one.
    """

    def unit(row: Row, step: int) -> Hashable:
        return (row.episode, step) if denominator == "step" else row.episode

    if denominator == "token":
        return [np.array(row.is_trained, float) for row in rows]
    counts = Counter(
        unit(row, step)
        for row in rows
        for step, is_trained in zip(row.steps, row.is_trained, strict=True)
        if is_trained
    )
    return [
        np.array(row.is_trained, float) / [max(1, counts[unit(row, step)]) for step in row.steps]
        for row in rows
    ]


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
    """Pad rows to tensors, under the names of TRL's GRPO batch where it has one.

    Args:
        rows: B rows.
        pad_token_id: Fills prompts on the left and completions on the right.
        pad_to_multiple_of: Round both widths up to a multiple of this.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` of shape (B, P), int64; ``completion_ids`` and
        ``completion_mask`` (B, T), int64; ``tool_mask`` and ``action_mask`` (B, T), int64, 1 where
        a token is trained, and trained and sampled; ``steps`` (B, T), int64, counted from the
        row's first; ``trajectory_lengths`` (B,), int64, trained tokens of the row's whole
        trajectory; ``sampling_per_token_logps`` (B, T), float32.
    """
    prompt_width = _width([len(row.prompt_ids) for row in rows], pad_to_multiple_of)
    width = _width([len(row.completion_ids) for row in rows], pad_to_multiple_of)

    def left(values: Sequence[int], fill: int) -> torch.Tensor:
        return torch.tensor([*[fill] * (prompt_width - len(values)), *values])

    def stack(values: Iterable[Sequence[float | int | bool]], fill: float = 0) -> torch.Tensor:
        return pad_right(values, width, fill)

    lengths: dict[int, int] = {}
    for row in rows:
        lengths[row.episode] = lengths.get(row.episode, 0) + sum(row.is_trained)
    return {
        "prompt_ids": torch.stack([left(row.prompt_ids, pad_token_id) for row in rows]),
        "prompt_mask": torch.stack([left([1] * len(row.prompt_ids), 0) for row in rows]),
        "completion_ids": stack((row.completion_ids for row in rows), pad_token_id).long(),
        # Padding rows keep one token to attend to: a row of nothing gives NaN in some kernels.
        "completion_mask": stack([1] * len(row.completion_ids) for row in rows).long(),
        "tool_mask": stack(row.is_trained for row in rows).long(),
        "action_mask": stack(
            [a and t for a, t in zip(row.is_action, row.is_trained, strict=True)] for row in rows
        ).long(),
        "steps": stack([step - row.steps[0] for step in row.steps] for row in rows).long(),
        "trajectory_lengths": torch.tensor([lengths[row.episode] for row in rows]),
        "sampling_per_token_logps": stack(row.logprobs for row in rows),
    }


def pad_right(
    values: Iterable[Sequence[float | int | bool]], width: int, fill: float = 0.0
) -> torch.Tensor:
    """Return one row per sequence, filled up to `width`; shape (B, width), float32."""
    rows = [[*row, *[fill] * (width - len(row))] for row in values]
    return torch.tensor(rows, dtype=torch.float32)


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
