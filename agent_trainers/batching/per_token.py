"""Loss weights and credit of the tokens of rows, and values of tokens sorted by step."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.rows import Row

Floats = npt.NDArray[np.floating[Any]]
Masks = Sequence[npt.NDArray[np.bool_]]
DENOMINATORS: Final = ("token", "step", "trajectory")


def loss_weights(rows: Sequence[Row], denominator: str) -> list[Floats]:
    """Return the loss weight of each token, not yet divided by the sum over the batch.

    ``token``: every trained token the same. ``step`` and ``trajectory``: each of them the same,
    divided among its tokens. `rows` are all of each trajectory that has any.
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


def credit_masks(rows: Sequence[Row], *, actions_only: bool) -> Masks:
    """Return which tokens of each row take part in credit, each (T,)."""
    return [
        np.array(row.is_action, bool) if actions_only else np.ones(len(row.steps), bool)
        for row in rows
    ]


def value_masks(
    rows: Sequence[Row], masks: Masks, advantages: Sequence[Floats], num_steps: Sequence[int]
) -> Masks:
    """Return which tokens of each row have a value that the estimator used, each (T,).

    The first token of each step where it gave one advantage per step, and all in `masks` else.
    """
    chosen = []
    for row, mask in zip(rows, masks, strict=True):
        is_first = np.diff(np.where(mask, row.steps, -1), prepend=-1) != 0
        is_per_step = len(advantages[row.episode]) == num_steps[row.episode]
        chosen.append(mask & is_first if is_per_step else mask)
    return chosen


def spread_over_tokens(
    rows: Sequence[Row], masks: Masks, values: Sequence[Floats], num_steps: Sequence[int]
) -> list[Floats]:
    """Give each token the value of its step or of the token; each (T,).

    Args:
        rows: All rows of each episode, in order.
        masks: Which tokens of each row have values, each (T,).
        values: For each episode one value per step, (S,), or one per token in `masks`, (N,), in the
            order of the steps; rows of agents that alternate have another.
        num_steps: Steps of each episode.
    """
    steps: dict[int, list[int]] = defaultdict(list)  # of the tokens of each episode
    starts = []
    for row, mask in zip(rows, masks, strict=True):
        starts.append(len(steps[row.episode]))
        steps[row.episode] += np.array(row.steps)[mask].tolist()
    for episode, count in ((episode, len(each)) for episode, each in steps.items()):
        if len(values[episode]) not in (num_steps[episode], count):
            raise ConfigurationError(
                f"The advantage estimator returned {len(values[episode])} numbers for an episode "
                f"of {num_steps[episode]} steps and {count} tokens. Return one per step, or one "
                "per token."
            )
    places = {  # of each token in the order of the steps
        episode: np.argsort(np.argsort(each, kind="stable")) for episode, each in steps.items()
    }
    spread: list[Floats] = []
    for row, mask, start in zip(rows, masks, starts, strict=True):
        own = values[row.episode]
        if len(own) == num_steps[row.episode]:
            spread.append(own[row.steps])
        else:
            spread.append(np.zeros(len(mask), np.float32))
            spread[-1][mask] = own[places[row.episode][start : start + mask.sum()]]
    return spread


def sort_by_step(
    rows: Sequence[Row], masks: Masks, values: Floats, num_steps: Sequence[int]
) -> list[list[Floats]]:
    """Return the values of the tokens in `masks` of each episode and step.

    `values` has one per token of these rows, and of padding rows after them, (B, T).
    """
    by_step: list[list[Floats]] = [[np.zeros(0, np.float32)] * count for count in num_steps]
    for row, mask, numbers in zip(rows, masks, values[: len(rows)], strict=True):
        steps = np.where(mask, row.steps, -1)
        for step in dict.fromkeys(row.steps):
            by_step[row.episode][step] = numbers[: len(steps)][steps == step]
    return by_step
