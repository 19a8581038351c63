"""From rows to tensors: padded to one width, integers as integers."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from agent_trainers.batching.rows import Row


def collate(rows: Sequence[Row], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad B rows to tensors, under the names of TRL's GRPO batch where it has one.

    `pad_token_id` fills prompts on the left and completions on the right.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` of shape (B, P), int64; ``completion_ids`` and
        ``completion_mask`` (B, T), int64; ``tool_mask`` and ``action_mask`` (B, T), int64, 1 where
        a token is trained, and trained and sampled; ``steps`` (B, T), int64, counted from the
        row's first; ``trajectory_lengths`` (B,), int64, trained tokens of the row's whole
        trajectory; ``trajectories`` (B,), int64, its number from 1, 0 for padding;
        ``sampling_per_token_logps`` (B, T), float32.
    """
    left = functools.partial(pad_rows, side="left")
    lengths: Counter[int] = Counter()
    for row in rows:
        lengths[row.episode] += sum(row.is_trained)
    return {
        "prompt_ids": left((row.prompt_ids for row in rows), pad_token_id),
        "prompt_mask": left([1] * len(row.prompt_ids) for row in rows),
        "completion_ids": pad_rows((row.completion_ids for row in rows), pad_token_id),
        # Padding rows keep one token to attend to: a row of nothing gives NaN in some kernels.
        "completion_mask": pad_rows([1] * len(row.completion_ids) for row in rows),
        "tool_mask": pad_rows(row.is_trained for row in rows),
        "action_mask": pad_rows(
            [a and t for a, t in zip(row.is_action, row.is_trained, strict=True)] for row in rows
        ),
        "steps": pad_rows([step - row.steps[0] for step in row.steps] for row in rows),
        "trajectory_lengths": torch.tensor([lengths[row.episode] for row in rows]),
        "trajectories": torch.tensor([row.episode + 1 for row in rows]),
        "sampling_per_token_logps": pad_rows((row.logprobs for row in rows), dtype=torch.float32),
    }


def pad_rows(
    values: Iterable[Any], fill: int = 0, *, dtype: torch.dtype = torch.int64, side: str = "right"
) -> torch.Tensor:
    """Return one row per sequence, filled up to the longest; shape (B, N)."""
    sequences = [torch.as_tensor(row, dtype=dtype) for row in values]
    return pad_sequence(sequences, batch_first=True, padding_value=fill, padding_side=side)


def pad_like(values: Iterable[Any], tokens: torch.Tensor) -> torch.Tensor:
    """Return values per token, one sequence per row, as (B, T), float32; 0 elsewhere.

    `tokens` are those of the batch, (B, T).
    """
    padded = torch.zeros(tokens.shape)
    for row, numbers in zip(padded, values, strict=False):  # padding rows come last
        row[: len(numbers)] = torch.as_tensor(numbers)
    return padded.to(tokens.device)
