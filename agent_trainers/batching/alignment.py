"""Rows as a model likes them best: flush left, padding on the right only.

Nothing that counts comes after padding then, so a causal model needs no mask, and attention can
leave out all that lies ahead.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Aligned(NamedTuple):
    """Rows flush left; N is the longest prompt with its completion."""

    input_ids: torch.Tensor
    """(B, N), int64."""
    labels: torch.Tensor
    """(B, N), int64: the tokens of completions, -100 elsewhere."""
    before: torch.Tensor
    """Position of the token before each completion token, (B, T), int64; what padding has is of no
    account."""


def align(rows: Mapping[str, torch.Tensor]) -> Aligned:
    """Move rows to the left.

    Args:
        rows: ``prompt_ids``, ``prompt_mask``, ``completion_ids``, ``completion_mask`` as `collate`
            makes them: prompts padded on the left, completions on the right.
    """
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)  # (B, P + T)
    lengths = rows["prompt_mask"].sum(dim=1, keepdim=True)  # (B, 1)
    ends = lengths + rows["completion_mask"].sum(dim=1, keepdim=True)  # (B, 1)
    places = torch.arange(int(ends.max()), device=ids.device)[None]  # (1, N)
    padding = rows["prompt_ids"].size(1) - lengths
    input_ids = ids.gather(1, (places + padding).clamp(max=ids.size(1) - 1))
    is_completion = (places >= lengths) & (places < ends)
    width = rows["completion_ids"].size(1)
    before = lengths - 1 + torch.arange(width, device=ids.device)[None]
    return Aligned(
        input_ids,
        input_ids.masked_fill(~is_completion, -100),
        before.clamp(max=places.size(1) - 1),
    )
