"""Pieces: rows that go through the model together.

Rows that are equal token by token, as short turns of a group often are, go through it once; what
comes out is spread over all of them, and their gradients add up on the way back.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from agent_trainers.batching.packing import group_rows, pack, pick_rows
from agent_trainers.batching.rows import trim

_TOKENS: Final = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class Piece(dict[str, torch.Tensor]):
    """Tensors of some rows of a batch, narrowed to them."""

    forwarded: dict[str, torch.Tensor]
    """Tokens and masks of the rows that differ, (U, ...): what goes through the model."""
    copies: list[int] | None
    """Which of them each row equals, shape (B,); None where all differ."""

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Turn values of the rows that differ, (U, T), into those of all, (B, T)."""
        return values if self.copies is None else pick_rows(values, self.copies)


def cut(
    batch: Mapping[str, torch.Tensor], *, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Cut a batch into pieces; rows that are equal are in the same.

    Args:
        batch: See `collate`.
        max_rows: See `pack`; counts rows that differ.
        max_tokens: See `pack`; counts tokens of rows that differ.

    Returns:
        Row numbers of each piece; every row once.
    """
    firsts, group = group_rows(*(batch[name] for name in _TOKENS))
    copies: list[list[int]] = [[] for _ in firsts]
    for row, number in enumerate(group):
        copies[number].append(row)
    pieces = pack(
        batch["prompt_mask"][firsts].sum(dim=1).tolist(),
        batch["completion_mask"][firsts].sum(dim=1).tolist(),
        max_rows=max_rows,
        max_tokens=max_tokens,
    )
    return [[row for number in piece for row in copies[number]] for piece in pieces]


def take(
    batch: Mapping[str, torch.Tensor], rows: Sequence[int], *, merge_equal: bool = True
) -> Piece:
    """Return a piece of a batch; of no rows, one row that weighs nothing.

    Args:
        batch: See `collate`.
        rows: Row numbers.
        merge_equal: Whether rows that are equal go through the model once.
    """
    chosen = list(rows) or [0]
    piece = Piece(trim({name: tensor[chosen] for name, tensor in batch.items()}))
    if not rows:
        weights = [name for name in piece if name.endswith("_weights")]
        piece |= {name: torch.zeros_like(piece[name]) for name in weights}
    groups = group_rows(*(piece[name] for name in _TOKENS))
    is_merged = merge_equal and len(groups.firsts) < len(chosen)
    piece.copies = groups.group if is_merged else None
    piece.forwarded = {
        name: piece[name][groups.firsts] if is_merged else piece[name] for name in _TOKENS
    }
    return piece
