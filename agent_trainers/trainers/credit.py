"""Credit of a batch that was played: advantages without a critic, or with one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from agent_trainers.algorithms.advantages import estimate, estimator_options
from agent_trainers.algorithms.episodes import Array, whiten
from agent_trainers.batching.collate import collate, pad_like
from agent_trainers.batching.per_token import (
    credit_masks,
    sort_by_step,
    spread_over_tokens,
    value_masks,
)
from agent_trainers.batching.rows import Row, state_row
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.trainers.distributed import ProcessGroup
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.ppo_config import StepPPOConfig
from agent_trainers.trajectory import Trajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlayedBatch:
    """What credit is made of; but for `episodes`, this process's share of a generation batch."""

    trajectories: Sequence[Trajectory]
    """What was played."""
    rows: Sequence[Row]
    """Its rows, without padding rows."""
    tensors: dict[str, torch.Tensor]
    """The rows with their log-probabilities, then padding rows, (B, ...)."""
    episodes: Sequence[EpisodeSummary]
    """All processes' episodes, with the rewards that are credited."""
    first: int
    """Where this process's episodes begin in `episodes`."""

    @property
    def own_episodes(self) -> Sequence[EpisodeSummary]:
        """This process's episodes."""
        return self.episodes[self.first : self.first + len(self.trajectories)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What the trainer learns from a batch."""

    advantages: Sequence[Array]
    """Of all processes' episodes: one per step, (S,), or one per token, (N,)."""
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """What the critic learns, (B, T)."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """What is to be logged of it."""


AssignCredit = Callable[[PlayedBatch], Credit]
"""Assigns credit to a batch; collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupCredit:
    """Credit by an estimator that compares episodes."""

    args: StepGRPOConfig
    """Settings."""

    def __call__(self, batch: PlayedBatch) -> Credit:
        """Estimate over all processes: groups may be spread, and statistics are the batch's."""
        settings = self.args.estimator_settings
        return Credit(
            advantages=estimate(self.args.advantage_estimator, batch.episodes, **settings)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticCredit:
    """Credit by an estimator with values of a critic; the advantages are whitened."""

    args: StepPPOConfig
    """Settings."""
    processes: ProcessGroup
    """All processes."""
    values_of: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    """Returns the critic's value before each completion token of rows, (B, T)."""
    pad_token_id: int
    """Stands for the token that does not follow the last state."""

    def __call__(self, batch: PlayedBatch) -> Credit:
        """Estimate from this process's values; whiten over all processes."""
        rows, episodes, tokens = batch.rows, batch.own_episodes, batch.tensors["completion_ids"]
        num_steps = [len(episode.rewards) for episode in episodes]
        masks = credit_masks(rows, actions_only=self.args.advantage_mask)
        old_values = self.values_of(batch.tensors)
        values = sort_by_step(rows, old_values.cpu().numpy(), masks, num_steps)
        raw = self._estimate(batch, values)
        targets = [
            advantages + _aligned(steps, len(advantages))
            for advantages, steps in zip(raw, values, strict=True)
        ]
        has_value = value_masks(rows, masks, raw, num_steps)
        tensors = {
            "old_values": old_values,
            "value_targets": pad_like(spread_over_tokens(rows, masks, targets, num_steps), tokens),
            "value_weights": self.processes.normalise(pad_like(has_value, tokens)),
        }
        return Credit(
            advantages=whiten(self.processes.all_gather_objects(raw)),
            tensors=tensors,
            metrics=explained_variance(self.processes, **tensors),
        )

    def bootstrap_values(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the value of each trajectory's last state; 0 where it was not truncated."""
        values = [0.0] * len(trajectories)
        cut = [i for i, t in enumerate(trajectories) if t.is_scorable and t.is_truncated]
        if cut and self.args.bootstrap_truncated:
            pad = self.pad_token_id
            last = collate([state_row(trajectories[i].final_prompt_ids, pad) for i in cut], pad)
            for i, value in zip(cut, self.values_of(last)[:, 0].tolist(), strict=True):
                values[i] = value
        return values

    def _estimate(self, batch: PlayedBatch, values: Sequence[Sequence[Array]]) -> list[Array]:
        options: dict[str, Any] = {
            "bootstrap_values": self.bootstrap_values(batch.trajectories),
            "whiten": False,
        }
        known = estimator_options(self.args.advantage_estimator)
        return estimate(
            self.args.advantage_estimator,
            batch.own_episodes,
            values=values,
            **{name: value for name, value in options.items() if name in known},
            **self.args.estimator_settings,
        )


def explained_variance(
    processes: ProcessGroup,
    *,
    old_values: torch.Tensor,
    value_targets: torch.Tensor,
    value_weights: torch.Tensor,
) -> dict[str, float]:
    """Return how much of the targets' variance the values explain, and the targets' mean.

    Args:
        processes: All processes.
        old_values: The critic's values, (B, T).
        value_targets: What they should have been, (B, T).
        value_weights: What each counts, (B, T); they sum to 1 over all processes.

    Returns:
        ``critic/explained_variance``, 1 for all of it, 0 for none, NaN where nothing varies; and
        ``critic/value_target``.
    """
    errors = value_targets - old_values
    sums = [(value_weights * x**power).sum() for x in (value_targets, errors) for power in (1, 2)]
    mean, square, error, squared_error = processes.all_reduce(torch.stack(sums)).tolist()
    variance, unexplained = square - mean**2, squared_error - error**2
    explained = 1.0 - unexplained / variance if variance > 1e-12 else float("nan")
    return {"critic/explained_variance": explained, "critic/value_target": mean}


def _aligned(steps: Sequence[Array], length: int) -> Array:
    """Return the values that belong to `length` advantages: one per token, or one per step."""
    tokens = np.concatenate(steps) if length else np.zeros(0, np.float32)
    if len(tokens) == length:
        return tokens
    return np.array([step[0] for step in steps], np.float32)
