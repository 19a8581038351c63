"""Train a critic on how episodes ended that branched off the same states.

Its target is the mean outcome of the branches of a state (a soft label), by least squares: a proper
scoring rule, so what is learned is the expectation, on the scale of returns that PPO's critic has.
Three sets of tasks are kept apart: on the first it is trained, on the second the best epoch is
chosen and the values are calibrated, and the third says how reliable they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from agent_envs.errors import DataError
from agent_trainers.experimental.values.calibration import Line, Reliability, fit_line, reliability
from agent_trainers.experimental.values.process_value import split_by_tokens, states_at_every_token
from agent_trainers.trainers.critic import CriticModel
from agent_trainers.trajectory import Trajectory

TARGETS: Final = ("success", "return")
KINDS: Final = ("states", "actions")
_HELD_OUT: Final = 0.1
"""The share of tasks that the second set has, and the third."""
_MAX_GRADIENT_NORM: Final = 1.0
ROWS_PER_STEP: Final = 16
"""Sequences of an optimiser step. As many as fit would be three or four steps an epoch, which do
little more than find the mean."""
_WARMUP: Final = 0.1
"""The share of steps over which the learning rate rises; over the others it falls to 0."""


class Example(NamedTuple):
    """A state, or an action in a state, and what followed."""

    ids: tuple[int, ...]
    """Its tokens, from the beginning of the state on."""
    is_action: bool
    """Whether an action stands at its end."""
    outcomes: list[float]
    """How each episode went on from there."""

    @property
    def label(self) -> float:
        """The mean outcome."""
        return sum(self.outcomes) / len(self.outcomes)


class ExampleRow(NamedTuple):
    """A sequence, and the examples that it begins with: one pass of the model reads them all."""

    ids: tuple[int, ...]
    examples: list[Example]
    states: torch.Tensor | None = None
    """What the model below the value head makes of the examples, (N, H), where that is kept."""


class ExampleSets(NamedTuple):
    """Examples of tasks that are kept apart."""

    train: list[ExampleRow]
    calibration: list[ExampleRow]
    test: list[ExampleRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How a critic is trained."""

    epochs: int
    """Passes over the examples."""
    learning_rate: float
    """AdamW's."""
    head_only: bool = False
    """Whether the model below the value head stays as it is."""


def outcome(trajectory: Trajectory, step: int, target: str, gamma: float) -> float:
    """Return what followed a step: success, or the discounted return from the step on."""
    if target == "success":
        return float(trajectory.success)
    rewards = trajectory.rewards[step:]
    return float(sum(reward * gamma**i for i, reward in enumerate(rewards)))


def make_sets(
    trajectories: Sequence[Trajectory], target: str, gamma: float, rng: np.random.Generator
) -> ExampleSets:
    """Make examples of episodes and of their branches, of which equal states are one.

    Raises:
        DataError: If there are too few tasks to keep three sets apart, or no tokens.
    """
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.is_scorable:
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
    if not any(t.prompt_ids for same in by_task.values() for e in same for t in e.transitions):
        raise DataError(
            "The episodes hold no tokens, as those of a served model: play them with --model."
        )
    order = [list(by_task)[i] for i in rng.permutation(len(by_task))]
    num_held_out = max(1, round(_HELD_OUT * len(order)))
    ends = [max(0, len(order) - 2 * num_held_out), max(0, len(order) - num_held_out)]
    sets = [order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :]]
    if not all(sets):
        raise DataError(
            f"{len(order)} tasks with episodes that could be scored are too few to train on some, "
            "calibrate on others and measure on others again. Play more tasks."
        )
    return ExampleSets(
        *(
            _merge(_examples([t for name in tasks for t in by_task[name]], target, gamma))
            for tasks in sets
        )
    )


def fit(
    critic: CriticModel, sets: ExampleSets, settings: FitSettings, rng: np.random.Generator
) -> Iterator[tuple[float, float]]:
    """Train a critic, and leave it with the weights of its best epoch.

    Yields the mean squared error of each epoch, in training and on the second set.
    """
    critic.eval()  # no dropout: there are few epochs, and the best is chosen
    critic.body.requires_grad_(not settings.head_only)
    if settings.head_only:  # what is below stays as it is, so it is read once
        sets = sets._replace(
            train=_with_states(critic, sets.train),
            calibration=_with_states(critic, sets.calibration),
        )
    weights = [p for p in critic.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)
    _begin_at_the_mean(critic, sets.train)
    num_steps = settings.epochs * -(-len(sets.train) // ROWS_PER_STEP)
    schedule = get_linear_schedule_with_warmup(optimizer, round(_WARMUP * num_steps), num_steps)
    best, kept = float("inf"), _copy(critic)
    for _ in range(settings.epochs):
        rows = [sets.train[i] for i in rng.permutation(len(sets.train))]
        total = count = 0.0
        for start in range(0, len(rows), ROWS_PER_STEP):
            optimizer.zero_grad()
            loss, weight = _add_gradient(critic, rows[start : start + ROWS_PER_STEP])
            nn.utils.clip_grad_norm_(weights, _MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
            total, count = total + loss, count + weight
        measured = _mean_squared_error(critic, sets.calibration)
        if measured < best:
            best, kept = measured, _copy(critic)
        yield total / count, measured
    critic.load_state_dict(kept)
    critic.body.requires_grad_(True)


def _begin_at_the_mean(critic: CriticModel, rows: Sequence[ExampleRow]) -> None:
    """Let a head that knows nothing yet say the mean label of everything."""
    head = critic.head.linear
    if bool(head.weight.any()) or bool(head.bias.any()):
        return
    outcomes = [outcome for row in rows for e in row.examples for outcome in e.outcomes]
    with torch.no_grad():
        head.bias.fill_(sum(outcomes) / len(outcomes))


def _add_gradient(critic: CriticModel, rows: Sequence[ExampleRow]) -> tuple[float, float]:
    """Add the gradient of the mean squared error of rows; return its sum, and that of weights."""
    weight = float(sum(len(e.outcomes) for row in rows for e in row.examples))
    total = 0.0
    for batch in _batches(rows):
        loss, _ = _squared_error(critic, batch)
        torch.autograd.backward(loss / weight)
        total += float(loss.detach())
    return total, weight


def calibrate(critic: CriticModel, rows: Sequence[ExampleRow]) -> Line:
    """Set slope and mean of the values right; the line becomes part of the value head."""
    predicted, examples = _predict(critic, rows)
    line = fit_line(predicted, [e.label for e in examples], [len(e.outcomes) for e in examples])
    with torch.no_grad():
        critic.head.linear.weight.mul_(line.slope)
        critic.head.linear.bias.mul_(line.slope).add_(line.intercept)
    return line


def measure(critic: CriticModel, rows: Sequence[ExampleRow]) -> dict[str, Reliability]:
    """Say how reliable the values of states and of actions are."""
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
    """Return the mean squared error of labels, each by its weight; NaN where nobody can know.

    As the outcomes of one state differ, so may their mean: what is left for a perfect value.
    """
    squares = sum(float(np.var(e.outcomes)) * len(e.outcomes) for e in examples)
    count = sum(len(e.outcomes) for e in examples)
    degrees = count - len(examples)
    return squares / degrees * len(examples) / count if degrees else float("nan")


def _examples(trajectories: Sequence[Trajectory], target: str, gamma: float) -> list[Example]:
    pooled: dict[tuple[tuple[int, ...], bool], list[float]] = {}
    for trajectory in trajectories:
        # the steps before are the recorded episode's, which counts them itself
        for step, transition in list(enumerate(trajectory.transitions))[trajectory.start :]:
            value = outcome(trajectory, step, target, gamma)
            state = tuple(transition.prompt_ids)
            action = (*state, *transition.completion_ids)
            for ids, is_action in ((state, False), (action, True)):
                pooled.setdefault((ids, is_action), []).append(value)
    return [Example(ids, is_action, found) for (ids, is_action), found in pooled.items()]


def _merge(examples: Sequence[Example]) -> list[ExampleRow]:
    """Put examples that begin another one into its row."""
    rows: list[ExampleRow] = []
    for example in sorted(examples, key=lambda e: e.ids, reverse=True):
        # what begins with this one stands right after it in order, so it came just before
        if not (rows and rows[-1].ids[: len(example.ids)] == example.ids):
            rows.append(ExampleRow(example.ids, []))
        rows[-1].examples.append(example)
    return rows


def _batches(rows: Sequence[ExampleRow]) -> Iterator[list[ExampleRow]]:
    return split_by_tokens(rows, [len(row.ids) for row in rows])


def _values(critic: CriticModel, batch: Sequence[ExampleRow]) -> torch.Tensor:
    """Return the value of each example of a batch of rows, one after the other, (N,)."""
    kept = [row.states for row in batch if row.states is not None]
    values: torch.Tensor = critic.head(
        torch.cat(kept) if len(kept) == len(batch) else _states(critic, batch)
    )
    return values


def _states(critic: CriticModel, batch: Sequence[ExampleRow]) -> torch.Tensor:
    """Return the hidden states of the examples of a batch, one after the other, (N, H)."""
    hidden = states_at_every_token(critic, [row.ids for row in batch])
    places = [(i, len(e.ids) - 1) for i, row in enumerate(batch) for e in row.examples]
    numbers, positions = torch.tensor(places, device=hidden.device).T
    return hidden[numbers, positions]


@torch.no_grad()
def _with_states(critic: CriticModel, rows: Sequence[ExampleRow]) -> list[ExampleRow]:
    """Return rows with their hidden states, those of similar lengths read together."""
    found: list[ExampleRow] = []
    for batch in _batches(sorted(rows, key=lambda row: len(row.ids))):
        states = _states(critic, batch)
        ends = np.cumsum([len(row.examples) for row in batch]).tolist()
        for row, end in zip(batch, ends, strict=True):
            found.append(row._replace(states=states[end - len(row.examples) : end]))
    return found


def _squared_error(critic: CriticModel, batch: Sequence[ExampleRow]) -> tuple[torch.Tensor, float]:
    """Return the sum of squared errors of labels by their weights, and that of the weights."""
    examples = [e for row in batch for e in row.examples]
    values = _values(critic, batch)
    labels = values.new_tensor([e.label for e in examples])
    weights = values.new_tensor([float(len(e.outcomes)) for e in examples])
    return (weights * (values - labels) ** 2).sum(), float(weights.sum())


@torch.no_grad()
def _mean_squared_error(critic: CriticModel, rows: Sequence[ExampleRow]) -> float:
    errors = [_squared_error(critic, batch) for batch in _batches(rows)]
    return sum(float(loss) for loss, _ in errors) / sum(weight for _, weight in errors)


@torch.no_grad()
def _predict(critic: CriticModel, rows: Sequence[ExampleRow]) -> tuple[list[float], list[Example]]:
    predicted = [v for batch in _batches(rows) for v in _values(critic, batch).tolist()]
    return predicted, [e for row in rows for e in row.examples]


def _copy(critic: CriticModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in critic.state_dict().items()}
