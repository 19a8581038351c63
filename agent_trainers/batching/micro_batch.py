"""Micro-batches: rows that go through the model together.

Rows that are equal token by token, as short turns of a group often are, go through it once. The
result is expanded to all of them, and their gradients add up.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

_TOKENS: Final = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")


class MicroBatch(dict[str, torch.Tensor]):
    """Tensors of some rows of a batch, narrowed to them."""

    rows: list[int]
    """Their numbers in the batch; empty if only other processes have rows."""
    forwarded: dict[str, torch.Tensor]
    """Tokens and masks of the distinct rows, (U, ...), which go through the model."""
    copies: list[int] | None
    """The distinct row that each row equals, shape (B,); None if all differ."""

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Turn values of the distinct rows, (U, T), into those of all rows, (B, T)."""
        return values if self.copies is None else pick_rows(values, self.copies)


def split_into_micro_batches(
    batch: Mapping[str, torch.Tensor], *, max_rows: int, max_tokens: int | None
) -> list[list[int]]:
    """Return the row numbers of each micro-batch; see `pack`, which counts rows that differ.

    Rows that are equal are in the same micro-batch.
    """
    firsts, group = group_rows(*(batch[name] for name in _TOKENS))
    copies: list[list[int]] = [[] for _ in firsts]
    for row, number in enumerate(group):
        copies[number].append(row)
    packed = pack(
        batch["prompt_mask"][firsts].sum(dim=1).tolist(),
        batch["completion_mask"][firsts].sum(dim=1).tolist(),
        max_rows=max_rows,
        max_tokens=max_tokens,
    )
    return [[row for number in numbers for row in copies[number]] for numbers in packed]


def select_rows(batch: Mapping[str, torch.Tensor], rows: Sequence[int]) -> MicroBatch:
    """Return some rows of a batch as a micro-batch; of no rows, one row that weighs nothing."""
    chosen = list(rows) or [0]
    micro_batch = MicroBatch({name: tensor[chosen] for name, tensor in batch.items()})
    micro_batch.rows = list(rows)
    # TRL pads a generation batch to its longest row: cut columns of padding, (B, P) and (B, T)
    prompt_width = max(1, int(micro_batch["prompt_mask"].sum(dim=1).max()))
    width = max(1, int(micro_batch["completion_mask"].sum(dim=1).max()))
    for name, tensor in micro_batch.items():
        if name.startswith("prompt_"):
            micro_batch[name] = tensor[:, -prompt_width:]
        elif tensor.dim() == 2:
            micro_batch[name] = tensor[:, :width]
    if not rows:
        weights = [name for name in micro_batch if name.endswith("_weights")]
        micro_batch |= {name: torch.zeros_like(micro_batch[name]) for name in weights}
    groups = group_rows(*(micro_batch[name] for name in _TOKENS))
    is_merged = len(groups.firsts) < len(chosen)
    micro_batch.copies = groups.group if is_merged else None
    micro_batch.forwarded = {
        name: micro_batch[name][groups.firsts] if is_merged else micro_batch[name]
        for name in _TOKENS
    }
    return micro_batch


class RowGroups(NamedTuple):
    """Which rows are equal."""

    firsts: list[int]
    """The first row of each group, shape (U,)."""
    group: list[int]
    """The group of each row, shape (B,)."""


def group_rows(*columns: torch.Tensor) -> RowGroups:
    """Find rows that are equal in all columns, each of shape (B, ...), integers."""
    numbers: dict[tuple[int, ...], int] = {}
    rows = torch.cat(columns, dim=1).tolist()
    group = [numbers.setdefault(tuple(values), len(numbers)) for values in rows]
    firsts: dict[int, int] = {}
    for row, number in enumerate(group):
        firsts.setdefault(number, row)
    return RowGroups(list(firsts.values()), group)


def pick_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return rows of a tensor, some more than once; their gradients add up in a fixed order.

    ``values[rows]`` would add them up atomically in the order of CPU threads, so that no run would
    be deterministic.
    """
    return values.index_select(0, torch.tensor(rows, device=values.device))


def pack(
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    max_rows: int,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Sort rows by length and pack those of like length into micro-batches.

    A micro-batch is as wide as its longest prompt and its longest completion together: rows of
    like length waste little, and with a token budget its memory is the same however many rows
    there are. The longest come first, so memory runs out at once or not at all.

    A micro-batch has at most `max_rows`, or rows times width of `max_tokens`; a row that is longer
    by itself goes alone. Lengths are (B,). Returns the row numbers of each micro-batch.
    """
    order = np.argsort(-(np.asarray(prompt_lengths) + np.asarray(lengths)), kind="stable")
    packed: list[list[int]] = []
    widths = (0, 0)
    for row in order.tolist():
        wider = (max(widths[0], prompt_lengths[row]), max(widths[1], lengths[row]))
        count = len(packed[-1]) + 1 if packed else 0
        fits = count <= max_rows if max_tokens is None else count * sum(wider) <= max_tokens
        if packed and fits:
            packed[-1].append(row)
            widths = wider
        else:
            packed.append([row])
            widths = (prompt_lengths[row], lengths[row])
    return packed
