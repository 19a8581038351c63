"""Training of process values on the outcomes of episodes and of their branches.

The label of a state is the mean outcome of all continuations from it, fitted by least squares (a
proper scoring rule), so a value is an expectation on the scale of PPO's critic. Tasks are split
into three sets: training, choice of the epoch, and test.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from agent_envs.errors import DataError
from agent_trainers.experimental.values.process_value import hidden_states, split_by_tokens
from agent_trainers.trainers.ppo import CriticModel
from agent_trainers.trajectory import Trajectory

ROWS_PER_STEP: Final = 16
"""Rows per optimiser step; larger batches take too few steps to learn more than the mean."""
NUM_BINS: Final = 10
_HELD_OUT: Final = 0.1
_MAX_GRADIENT_NORM: Final = 1.0
_WARMUP: Final = 0.1


class Example(NamedTuple):
    """Tokens up to a state, or up to an action in it, and the outcomes that followed."""

    ids: tuple[int, ...]
    outcomes: list[float]


Row = list[Example]
"""Examples evaluated in one pass: all are prefixes of the first."""


class ExampleSets(NamedTuple):
    """Rows of disjoint sets of tasks."""

    train: list[Row]
    choice: list[Row]
    test: list[Row]


class Reliability(NamedTuple):
    """Agreement of predictions with observed outcomes, in the unit of the outcomes."""

    calibration_error: float
    """Expected calibration error over bins of equal weight (Naeini et al., AAAI 2015;
    arXiv:1909.10155)."""
    mean_squared_error: float
    """Includes the noise of the observations."""
    mean_squared_error_of_mean: float
    """Error of the constant prediction of the mean."""
    correlation: float
    """NaN if predictions or observations are constant."""


def outcome(trajectory: Trajectory, step: int, target: str, gamma: float) -> float:
    """Return the success, or the discounted return from a step on."""
    if target == "success":
        return float(trajectory.success)
    return float(sum(r * gamma**i for i, r in enumerate(trajectory.rewards[step:])))


def make_sets(
    trajectories: Sequence[Trajectory], target: str, gamma: float, rng: np.random.Generator
) -> ExampleSets:
    """Make examples of episodes and branches; equal token sequences share one example."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.is_scorable:
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
    order = [list(by_task)[i] for i in rng.permutation(len(by_task))]
    held_out = max(1, round(_HELD_OUT * len(order)))
    if len(order) <= 2 * held_out:
        raise DataError(
            f"{len(order)} tasks with scorable episodes are too few for training, choice and test "
            "sets. Collect more tasks."
        )
    splits = order[: -2 * held_out], order[-2 * held_out : -held_out], order[-held_out:]
    return ExampleSets(
        *(_rows([t for name in names for t in by_task[name]], target, gamma) for names in splits)
    )


def fit(
    critic: CriticModel,
    sets: ExampleSets,
    *,
    epochs: int,
    learning_rate: float,
    rng: np.random.Generator,
) -> Iterator[tuple[float, float]]:
    """Train a critic and restore the weights of its best epoch on the set of choice.

    Yields the mean squared errors of each epoch on both sets.
    """
    critic.eval()  # without dropout
    optimizer = torch.optim.AdamW(critic.parameters(), lr=learning_rate, weight_decay=0.0)
    head = critic.head.linear
    if not (bool(head.weight.any()) or bool(head.bias.any())):  # it predicts the mean at first
        outcomes = [o for row in sets.train for example in row for o in example.outcomes]
        nn.init.constant_(head.bias, float(np.mean(outcomes)))
    num_steps = epochs * -(-len(sets.train) // ROWS_PER_STEP)
    schedule = get_linear_schedule_with_warmup(optimizer, round(_WARMUP * num_steps), num_steps)
    best, best_state = float("inf"), _copy(critic)
    for _ in range(epochs):
        rows = [sets.train[i] for i in rng.permutation(len(sets.train))]
        errors = []
        for start in range(0, len(rows), ROWS_PER_STEP):
            optimizer.zero_grad()
            errors.append(_squared_error(critic, rows[start : start + ROWS_PER_STEP], train=True))
            nn.utils.clip_grad_norm_(critic.parameters(), _MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
        total, count = np.sum(errors, axis=0)
        with torch.no_grad():
            error, weight = _squared_error(critic, sets.choice)
        if error / weight < best:
            best, best_state = error / weight, _copy(critic)
        yield float(total / count), error / weight
    critic.load_state_dict(best_state)


@torch.no_grad()
def measure(critic: CriticModel, rows: Sequence[Row]) -> Reliability:
    """Return the reliability of the values of states, and of actions in them."""
    batches = [torch.stack(batch).cpu() for batch in _values(critic, rows)]
    return reliability(*torch.cat(batches, dim=1).tolist())


def reliability(
    predicted: Sequence[float], observed: Sequence[float], weights: Sequence[float]
) -> Reliability:
    """Compare predictions with mean outcomes over `weights` observations, (N,) each."""
    p, y, w = (np.asarray(x, np.float64) for x in (predicted, observed, weights))
    order = np.argsort(p, kind="stable")
    quantile = (np.cumsum(w[order]) - w[order] / 2) / w.sum()  # middle of each weight, in (0, 1)
    number = np.minimum((quantile * NUM_BINS).astype(int), NUM_BINS - 1)
    bins = [order[number == i] for i in np.unique(number)]
    apart = sum(abs(float(w[bin_] @ (p[bin_] - y[bin_]))) for bin_ in bins)
    (variance_p, covariance), (_, variance_y) = np.cov(p, y, aweights=w, ddof=0)
    varies = min(variance_p, variance_y) > 1e-18
    return Reliability(
        calibration_error=apart / float(w.sum()),
        mean_squared_error=float(np.average((p - y) ** 2, weights=w)),
        mean_squared_error_of_mean=float(variance_y),
        correlation=float(covariance / (variance_p * variance_y) ** 0.5) if varies else np.nan,
    )


def _rows(trajectories: Sequence[Trajectory], target: str, gamma: float) -> list[Row]:
    pooled: dict[tuple[int, ...], list[float]] = {}
    for trajectory in trajectories:
        # a branch shares the steps before `start` with its episode, which counts them
        for step, transition in list(enumerate(trajectory.transitions))[trajectory.start :]:
            value = outcome(trajectory, step, target, gamma)
            state = tuple(transition.prompt_ids)
            for ids in (state, (*state, *transition.completion_ids)):
                pooled.setdefault(ids, []).append(value)
    examples = [Example(ids, found) for ids, found in pooled.items()]
    rows: list[Row] = []
    for example in sorted(examples, key=lambda e: e.ids, reverse=True):
        # in descending order, sequences with this prefix come directly before it
        if not (rows and rows[-1][0].ids[: len(example.ids)] == example.ids):
            rows.append([])
        rows[-1].append(example)
    return rows


def _values(
    critic: CriticModel, rows: Sequence[Row]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield values, labels and weights of the examples of each batch of rows, each (N,)."""
    for numbers in split_by_tokens([row[0].ids for row in rows]):
        batch = [rows[i] for i in numbers]
        hidden = hidden_states(critic, [row[0].ids for row in batch])
        examples = [(i, example) for i, row in enumerate(batch) for example in row]
        ends = [(i, len(example.ids) - 1) for i, example in examples]
        rows_of, positions = torch.tensor(ends, device=hidden.device).T
        values: torch.Tensor = critic.head(hidden[rows_of, positions])
        labels = values.new_tensor([np.mean(example.outcomes) for _, example in examples])
        yield values, labels, values.new_tensor([len(example.outcomes) for _, example in examples])


def _squared_error(
    critic: CriticModel, rows: Sequence[Row], *, train: bool = False
) -> tuple[float, float]:
    """Return the weighted squared error and the weight; `train` adds the gradient of the mean."""
    weight = float(sum(len(example.outcomes) for row in rows for example in row))
    total = 0.0
    for values, labels, weights in _values(critic, rows):
        error = (weights * (values - labels) ** 2).sum()
        if train:
            torch.autograd.backward(error / weight)
        total += float(error.detach())
    return total, weight


def _copy(critic: CriticModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in critic.state_dict().items()}
