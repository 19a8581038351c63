"""From rows to tensors: padded to one width, integers as integers."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from agent_trainers.batching.rows import Row


def num_rows_per_process(num_rows: Sequence[int], num_splits: int) -> int:
    """Return how many rows every process must hold, given those of each.

    As many as the fullest process has, rounded up to a multiple of `num_splits` micro-batches,
    because TRL's ``split_tensor_dict`` would drop an uneven tail.
    """
    return max(1, math.ceil(max(num_rows) / num_splits)) * num_splits


def collate(
    rows: Sequence[Row], pad_token_id: int, pad_to_multiple_of: int | None = None
) -> dict[str, torch.Tensor]:
    """Pad B rows to tensors, under the names of TRL's GRPO batch where it has one.

    `pad_token_id` fills prompts on the left and completions on the right.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` of shape (B, P), int64; ``completion_ids`` and
        ``completion_mask`` (B, T), int64; ``tool_mask`` and ``action_mask`` (B, T), int64, 1 where
        a token is trained, and trained and sampled; ``steps`` (B, T), int64, counted from the
        row's first; ``trajectory_lengths`` (B,), int64, trained tokens of the row's whole
        trajectory; ``sampling_per_token_logps`` (B, T), float32.
    """
    right = functools.partial(pad_rows, multiple=pad_to_multiple_of or 1)
    left = functools.partial(right, side="left")
    lengths: Counter[int] = Counter()
    for row in rows:
        lengths[row.episode] += sum(row.is_trained)
    return {
        "prompt_ids": left((row.prompt_ids for row in rows), pad_token_id),
        "prompt_mask": left([1] * len(row.prompt_ids) for row in rows),
        "completion_ids": right((row.completion_ids for row in rows), pad_token_id),
        # Padding rows keep one token to attend to: a row of nothing gives NaN in some kernels.
        "completion_mask": right([1] * len(row.completion_ids) for row in rows),
        "tool_mask": right(row.is_trained for row in rows),
        "action_mask": right(
            [a and t for a, t in zip(row.is_action, row.is_trained, strict=True)] for row in rows
        ),
        "steps": right([step - row.steps[0] for step in row.steps] for row in rows),
        "trajectory_lengths": torch.tensor([lengths[row.episode] for row in rows]),
        "sampling_per_token_logps": right((row.logprobs for row in rows), dtype=torch.float32),
    }


def pad_rows(
    values: Iterable[Any],
    fill: int = 0,
    *,
    multiple: int,
    dtype: torch.dtype = torch.int64,
    side: str = "right",
) -> torch.Tensor:
    """Return one row per sequence, filled up to the longest, rounded up; shape (B, N)."""
    sequences = [torch.as_tensor(row, dtype=dtype) for row in values]
    rows = pad_sequence(sequences, batch_first=True, padding_value=fill, padding_side=side)
    missing = -rows.size(1) % multiple
    return pad(rows, (missing, 0) if side == "left" else (0, missing), value=fill)


def pad_like(values: Iterable[Any], tokens: torch.Tensor) -> torch.Tensor:
    """Return values per token, one sequence per row, as (B, T), float32; 0 elsewhere.

    `tokens` are those of the batch, (B, T).
    """
    padded = torch.zeros(tokens.shape)
    for row, numbers in zip(padded, values, strict=False):  # padding rows come last
        row[: len(numbers)] = torch.as_tensor(numbers)
    return padded.to(tokens.device)


def trim(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the columns in which every row of a micro-batch is padding.

    TRL pads a whole generation batch to its longest row before it splits it. Any tensor of two
    dimensions is (B, P) or (B, T).
    """
    prompt_width = max(1, int(batch["prompt_mask"].sum(dim=1).max()))
    width = max(1, int(batch["completion_mask"].sum(dim=1).max()))
    trimmed = dict(batch)
    for name, tensor in batch.items():
        if name.startswith("prompt_"):
            trimmed[name] = tensor[:, -prompt_width:]
        elif tensor.dim() == 2:
            trimmed[name] = tensor[:, :width]
    return trimmed
