"""Batch builder: from trajectories to rows, tensors, loss weights and credit, in one pass."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.collate import collate, pad_like
from agent_trainers.batching.per_token import credit_masks, loss_weights, spread_over_tokens
from agent_trainers.batching.rows import Row, make_rows, padding_row
from agent_trainers.monitoring.episode_statistics import EpisodeSummary, summarise
from agent_trainers.monitoring.trajectory_samples import BatchRecord
from agent_trainers.trajectory import Trajectory


class BuiltBatch(NamedTuple):
    """A batch ready for training."""

    record: BatchRecord
    """This process's share."""
    episodes: Sequence[EpisodeSummary]
    """All processes' episodes."""


class BatchBuilder:
    """Builds batches; all processes build their shares at the same time."""

    def __init__(self, trainer: Any) -> None:
        """Build for a `StepGRPOTrainer`, which assigns the credit."""
        self._trainer, self._args, self._processes = trainer, trainer.args, trainer.processes
        self._pad = trainer._tokenizer.pad_token_id

    def build(
        self, policy: Any, trajectories: Sequence[Trajectory], reward_factors: Mapping[str, float]
    ) -> BuiltBatch:
        """Build a batch of this process's trajectories for the model `policy`."""
        rows = self._make_rows(trajectories)
        # as many rows in each process, and no uneven tail, which TRL's split_tensor_dict would drop
        num_splits = self._args.steps_per_generation if policy.training else 1
        most = max(self._processes.all_gather(len(rows)))
        num_rows = max(1, math.ceil(most / num_splits)) * num_splits
        padded = [*rows, *[padding_row(self._pad)] * (num_rows - len(rows))]
        tensors = {
            name: tensor.to(self._processes.device)
            for name, tensor in collate(padded, self._pad).items()
        }
        tokens = tensors["completion_ids"]
        weights = pad_like(loss_weights(rows, self._args.loss_denominator), tokens)
        tensors["loss_weights"] = self._processes.normalise(weights)
        tensors |= self._trainer.scorer.fixed_logprobs(policy, tensors)
        for extension in self._trainer.extensions if policy.training else ():
            tensors |= extension.batch_tensors(policy, trajectories, rows, tensors)

        own = [summarise(trajectory, reward_factors) for trajectory in trajectories]
        episodes = self._processes.all_gather_objects(own)
        first = self._processes.num_before(len(own))
        record = BatchRecord(trajectories=trajectories, rows=rows, tensors=tensors)
        credit, targets = self._trainer.assign_credit(record, episodes, first)

        advantages = credit[first : first + len(own)]
        masks = credit_masks(rows, actions_only=self._args.advantage_mask)
        num_steps = [len(episode.rewards) for episode in own]
        spread = spread_over_tokens(rows, masks, advantages, num_steps)
        tensors |= {"advantages": pad_like(spread, tokens), **targets}
        episodes = [
            dataclasses.replace(episode, has_signal=bool(np.any(values)))
            for episode, values in zip(episodes, credit, strict=True)
        ]
        return BuiltBatch(dataclasses.replace(record, advantages=advantages), episodes)

    def _make_rows(self, trajectories: Sequence[Trajectory]) -> list[Row]:
        rows: list[Row] = []
        for i, trajectory in enumerate(trajectories):
            if not (
                trajectory.is_scorable
                and all(extension.is_trained(trajectory) for extension in self._trainer.extensions)
            ):
                continue
            own = make_rows(
                trajectory,
                i,
                merge=self._args.merge_steps,
                train_truncated=not self._args.mask_truncated_completions,
                train_observations=not self._args.loss_mask,
            )
            if len(own) > 1 and self._args.importance_sampling_level == "sequence":
                raise ConfigurationError(
                    "importance_sampling_level='sequence' needs whole trajectories in a row, but "
                    "a state did not extend the one before (see the context of the environment, "
                    "and its chat template). Use 'step', or context='full'."
                )
            rows += own
        return rows
