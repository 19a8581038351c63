"""Which rows go through a model together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class RowGroups(NamedTuple):
    """Which rows are equal."""

    firsts: list[int]
    """The first row of each group, shape (U,)."""
    group: list[int]
    """The group of each row, shape (B,)."""


def group_rows(*columns: torch.Tensor) -> RowGroups:
    """Find rows that are equal in all columns, each of shape (B, ...), integers."""
    numbers: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    group: list[int] = []
    for row, values in enumerate(torch.cat(columns, dim=1).tolist()):
        number = numbers.setdefault(tuple(values), len(firsts))
        if number == len(firsts):
            firsts.append(row)
        group.append(number)
    return RowGroups(firsts, group)


def pick_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return rows of a tensor, some more than once; their gradients add up in a fixed order.

    ``values[rows]`` would add them up atomically, in whatever order threads come by on a CPU, and
    no run could be repeated bit by bit.
    """
    return values.index_select(0, torch.tensor(rows, device=values.device))


def pack(
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    max_rows: int,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Sort rows by length and cut them into micro-batches of rows that go together.

    A micro-batch is as wide as its longest prompt and its longest completion together: rows of
    like length waste little, and with a token budget its memory is the same however many rows
    there are. The longest come first, so memory runs out at once or not at all.

    Args:
        prompt_lengths: Tokens of each row's prompt, shape (B,).
        lengths: Tokens of each row's completion, shape (B,).
        max_rows: Rows of a micro-batch, where there is no token budget.
        max_tokens: Rows times width that a micro-batch may have, padding included; a row that is
            longer by itself goes alone.

    Returns:
        Row numbers of each micro-batch; every row once.
    """
    order = np.argsort(-(np.asarray(prompt_lengths) + np.asarray(lengths)), kind="stable")
    pieces: list[list[int]] = []
    widths = (0, 0)
    for row in order.tolist():
        wider = (max(widths[0], prompt_lengths[row]), max(widths[1], lengths[row]))
        count = len(pieces[-1]) + 1 if pieces else 0
        fits = count <= max_rows if max_tokens is None else count * sum(wider) <= max_tokens
        if pieces and fits:
            pieces[-1].append(row)
            widths = wider
        else:
            pieces.append([row])
            widths = (prompt_lengths[row], lengths[row])
    return pieces
