"""What a token of a row weighs and is credited with, and values of tokens sorted by step."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.rows import Row

Floats = npt.NDArray[np.floating[Any]]
DENOMINATORS: Final = ("token", "step", "trajectory")


def loss_weights(rows: Sequence[Row], denominator: str) -> list[Floats]:
    """Return what each token weighs, not yet divided by the sum over the batch.

    ``token``: every trained token the same. ``step``: every step the same, divided among its
    tokens. ``trajectory``: every trajectory the same, divided among its tokens.

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


def credit_masks(rows: Sequence[Row], *, actions_only: bool) -> list[npt.NDArray[np.bool_]]:
    """Return which tokens of each row have credit of their own, each (T,)."""
    return [
        np.array(row.is_action, bool) if actions_only else np.ones(len(row.steps), bool)
        for row in rows
    ]


def value_masks(
    rows: Sequence[Row],
    masks: Sequence[npt.NDArray[np.bool_]],
    advantages: Sequence[Floats],
    num_steps: Sequence[int],
) -> list[npt.NDArray[np.bool_]]:
    """Return which tokens of each row have a value that the estimator looked at, each (T,).

    Args:
        rows: The rows.
        masks: Which tokens of each row have credit, each (T,).
        advantages: What came of it: of shape (S,) the first token of a step counts, of shape (N,)
            every token.
        num_steps: Steps of each episode.
    """
    looked_at = []
    for row, mask in zip(rows, masks, strict=True):
        if len(advantages[row.episode]) == num_steps[row.episode]:
            mask = mask & (np.diff(np.where(mask, row.steps, -1), prepend=-1) != 0)
        looked_at.append(mask)
    return looked_at


def spread_over_tokens(
    rows: Sequence[Row],
    masks: Sequence[npt.NDArray[np.bool_]],
    values: Sequence[Floats],
    num_steps: Sequence[int],
) -> list[Floats]:
    """Give each token the value of its step, or its own; each (T,).

    Args:
        rows: All rows of each episode, in order.
        masks: Which tokens of each row have a value of their own, each (T,).
        values: For each episode one value per step, (S,), or one per token in `masks`, (N,).
        num_steps: Steps of each episode.

    Raises:
        ConfigurationError: If an episode has another number of values.
    """
    num_tokens = Counter[int]()
    for row, mask in zip(rows, masks, strict=True):
        num_tokens[row.episode] += int(mask.sum())
    starts, spread = Counter[int](), []
    for row, mask in zip(rows, masks, strict=True):
        own = values[row.episode]
        if len(own) == num_steps[row.episode]:
            spread.append(own[row.steps])
            continue
        if len(own) != num_tokens[row.episode]:
            raise ConfigurationError(
                f"The advantage estimator returned {len(own)} numbers for an episode of "
                f"{num_steps[row.episode]} steps and {num_tokens[row.episode]} tokens. Return one "
                "per step, or one per token."
            )
        tokens = np.zeros(len(mask), np.float32)
        start, count = starts[row.episode], int(mask.sum())
        tokens[mask] = own[start : start + count]
        starts[row.episode] += count
        spread.append(tokens)
    return spread


def sort_by_step(
    rows: Sequence[Row],
    values: Floats,
    masks: Sequence[npt.NDArray[np.bool_]],
    num_steps: Sequence[int],
) -> list[list[Floats]]:
    """Sort values of tokens by episode and step.

    Args:
        rows: The rows.
        values: A value per token of these rows, and of padding rows after them, (B, T).
        masks: Which tokens of each row count, each (T,).
        num_steps: Steps of each episode.

    Returns:
        For each episode and step, the values of the tokens that count.
    """
    by_step: list[list[Floats]] = [[np.zeros(0, np.float32)] * count for count in num_steps]
    for row, mask, numbers in zip(rows, masks, values[: len(rows)], strict=True):
        steps = np.where(mask, row.steps, -1)
        for step in dict.fromkeys(row.steps):
            by_step[row.episode][step] = numbers[: len(steps)][steps == step]
    return by_step
