"""Training of process values on the outcomes of episodes and of their branches.

The label of a state is the mean outcome of all continuations from it, fitted by least squares (a
proper scoring rule), so a value is an expectation on the scale of PPO's critic. Tasks are split
into three sets: training, choice of the epoch and calibration, and test.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from agent_envs.errors import DataError
from agent_trainers.experimental.values.process_value import hidden_states, split_by_tokens
from agent_trainers.experimental.values.reliability import (
    Line,
    Reliability,
    fit_line,
    reliability,
)
from agent_trainers.trainers.ppo import CriticModel
from agent_trainers.trajectory import Trajectory

KINDS: Final = ("states", "actions")
ROWS_PER_STEP: Final = 16
"""Rows per optimiser step; larger batches take too few steps to learn more than the mean."""
_HELD_OUT: Final = 0.1
_MAX_GRADIENT_NORM: Final = 1.0
_WARMUP: Final = 0.1


class Example(NamedTuple):
    """Tokens up to a state, or up to an action in it, and the outcomes that followed."""

    ids: tuple[int, ...]
    is_action: bool
    outcomes: list[float]

    @property
    def label(self) -> float:
        """Mean outcome."""
        return sum(self.outcomes) / len(self.outcomes)


class ExampleRow(NamedTuple):
    """A sequence and the examples that are prefixes of it, evaluated in one pass."""

    ids: tuple[int, ...]
    examples: list[Example]


class ExampleSets(NamedTuple):
    """Rows of disjoint sets of tasks."""

    train: list[ExampleRow]
    calibration: list[ExampleRow]
    test: list[ExampleRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Hyperparameters of `fit`."""

    epochs: int
    """Passes over the examples."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    head_only: bool = False
    """Whether the model below the value head is frozen."""


def outcome(trajectory: Trajectory, step: int, target: str, gamma: float) -> float:
    """Return the success, or the discounted return from a step on."""
    if target == "success":
        return float(trajectory.success)
    return float(sum(r * gamma**i for i, r in enumerate(trajectory.rewards[step:])))


def make_sets(
    trajectories: Sequence[Trajectory], target: str, gamma: float, rng: np.random.Generator
) -> ExampleSets:
    """Make examples of episodes and branches; equal token sequences share one example.

    Raises:
        DataError: If there are too few tasks for three sets, or the episodes have no tokens.
    """
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.is_scorable:
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
    if not any(t.prompt_ids for same in by_task.values() for e in same for t in e.transitions):
        raise DataError(
            "The episodes contain no tokens (a served model returns none). Collect them with a "
            "local --model."
        )
    order = [list(by_task)[i] for i in rng.permutation(len(by_task))]
    held_out = max(1, round(_HELD_OUT * len(order)))
    ends = [max(0, len(order) - 2 * held_out), max(0, len(order) - held_out)]
    splits = [order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :]]
    if not all(splits):
        raise DataError(
            f"{len(order)} tasks with scorable episodes are too few for training, calibration and "
            "test sets. Collect more tasks."
        )
    return ExampleSets(
        *(
            _merge(_examples([t for name in names for t in by_task[name]], target, gamma))
            for names in splits
        )
    )


def fit(
    critic: CriticModel, sets: ExampleSets, settings: FitSettings, rng: np.random.Generator
) -> Iterator[tuple[float, float]]:
    """Train a critic and restore the weights of its best epoch on the calibration set.

    Yields the mean squared errors of each epoch on the training and calibration sets.
    """
    critic.eval()  # without dropout
    critic.body.requires_grad_(not settings.head_only)
    weights = [p for p in critic.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)
    _initialise_bias(critic, sets.train)
    num_steps = settings.epochs * -(-len(sets.train) // ROWS_PER_STEP)
    schedule = get_linear_schedule_with_warmup(optimizer, round(_WARMUP * num_steps), num_steps)
    best, best_state = float("inf"), _copy(critic)
    for _ in range(settings.epochs):
        rows = [sets.train[i] for i in rng.permutation(len(sets.train))]
        errors = []
        for start in range(0, len(rows), ROWS_PER_STEP):
            optimizer.zero_grad()
            errors.append(_squared_error(critic, rows[start : start + ROWS_PER_STEP], train=True))
            nn.utils.clip_grad_norm_(weights, _MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
        total, count = np.sum(errors, axis=0)
        with torch.no_grad():
            error, weight = _squared_error(critic, sets.calibration)
        if error / weight < best:
            best, best_state = error / weight, _copy(critic)
        yield float(total / count), error / weight
    critic.load_state_dict(best_state)
    critic.body.requires_grad_(True)


def calibrate(critic: CriticModel, rows: Sequence[ExampleRow]) -> Line:
    """Fit a calibration line and merge it into the value head."""
    predicted, examples = _predict(critic, rows)
    line = fit_line(predicted, [e.label for e in examples], [len(e.outcomes) for e in examples])
    with torch.no_grad():
        critic.head.linear.weight.mul_(line.slope)
        critic.head.linear.bias.mul_(line.slope).add_(line.intercept)
    return line


def measure(critic: CriticModel, rows: Sequence[ExampleRow]) -> dict[str, Reliability]:
    """Return the reliability of the values of states and of actions."""
    predicted, examples = _predict(critic, rows)
    measured = {}
    for kind in KINDS:
        chosen = [i for i, e in enumerate(examples) if KINDS[e.is_action] == kind]
        measured[kind] = reliability(
            [predicted[i] for i in chosen],
            [examples[i].label for i in chosen],
            [len(examples[i].outcomes) for i in chosen],
            noise=label_noise([examples[i] for i in chosen]),
        )
    return measured


def label_noise(examples: Sequence[Example]) -> float:
    """Return the mean squared error of labels, weighted by observations.

    It is estimated from the spread of outcomes within examples; NaN if no example has two.
    """
    squares = sum(float(np.var(e.outcomes)) * len(e.outcomes) for e in examples)
    count = sum(len(e.outcomes) for e in examples)
    degrees = count - len(examples)
    return squares / degrees * len(examples) / count if degrees else float("nan")


def _initialise_bias(critic: CriticModel, rows: Sequence[ExampleRow]) -> None:
    """Let an untrained head (all zeros) predict the mean outcome."""
    head = critic.head.linear
    if not (bool(head.weight.any()) or bool(head.bias.any())):
        nn.init.constant_(
            head.bias, float(np.mean([o for row in rows for e in row.examples for o in e.outcomes]))
        )


def _examples(trajectories: Sequence[Trajectory], target: str, gamma: float) -> list[Example]:
    pooled: dict[tuple[tuple[int, ...], bool], list[float]] = {}
    for trajectory in trajectories:
        # a branch shares the steps before `start` with its episode, which counts them
        for step, transition in list(enumerate(trajectory.transitions))[trajectory.start :]:
            value = outcome(trajectory, step, target, gamma)
            state = tuple(transition.prompt_ids)
            for ids, is_action in ((state, False), ((*state, *transition.completion_ids), True)):
                pooled.setdefault((ids, is_action), []).append(value)
    return [Example(ids, is_action, found) for (ids, is_action), found in pooled.items()]


def _merge(examples: Sequence[Example]) -> list[ExampleRow]:
    """Merge each example into a row that it is a prefix of."""
    rows: list[ExampleRow] = []
    for example in sorted(examples, key=lambda e: e.ids, reverse=True):
        # in descending order, sequences with this prefix come directly before it
        if not (rows and rows[-1].ids[: len(example.ids)] == example.ids):
            rows.append(ExampleRow(example.ids, []))
        rows[-1].examples.append(example)
    return rows


def _batches(rows: Sequence[ExampleRow]) -> Iterator[list[ExampleRow]]:
    return split_by_tokens(rows, [len(row.ids) for row in rows])


def _values(critic: CriticModel, batch: Sequence[ExampleRow]) -> torch.Tensor:
    """Return the values (N,) of the examples of a batch of rows, in order."""
    hidden = hidden_states(critic, [row.ids for row in batch])
    ends = [(i, len(e.ids) - 1) for i, row in enumerate(batch) for e in row.examples]
    rows, positions = torch.tensor(ends, device=hidden.device).T
    values: torch.Tensor = critic.head(hidden[rows, positions])
    return values


def _squared_error(
    critic: CriticModel, rows: Sequence[ExampleRow], *, train: bool = False
) -> tuple[float, float]:
    """Return the weighted squared error and the weight; `train` adds the gradient of the mean."""
    weight = float(sum(len(e.outcomes) for row in rows for e in row.examples))
    total = 0.0
    for batch in _batches(rows):
        examples = [e for row in batch for e in row.examples]
        values = _values(critic, batch)
        labels = values.new_tensor([e.label for e in examples])
        weights = values.new_tensor([float(len(e.outcomes)) for e in examples])
        error = (weights * (values - labels) ** 2).sum()
        if train:
            torch.autograd.backward(error / weight)
        total += float(error.detach())
    return total, weight


@torch.no_grad()
def _predict(critic: CriticModel, rows: Sequence[ExampleRow]) -> tuple[list[float], list[Example]]:
    predicted = [v for batch in _batches(rows) for v in _values(critic, batch).tolist()]
    return predicted, [e for row in rows for e in row.examples]


def _copy(critic: CriticModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in critic.state_dict().items()}
