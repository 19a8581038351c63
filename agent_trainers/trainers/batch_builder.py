"""Batch builder: from trajectories to rows, tensors, loss weights and credit, in one pass."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.collate import collate, pad_like
from agent_trainers.batching.per_token import credit_masks, loss_weights, spread_over_tokens
from agent_trainers.batching.rows import Row, make_rows, padding_row
from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.monitoring.trajectory_samples import BatchRecord
from agent_trainers.trajectory import Trajectory


def build_batch(
    trainer: Any, trajectories: Sequence[Trajectory], reward_factors: Mapping[str, float]
) -> BatchRecord:
    """Build a batch of this process's trajectories for a `StepGRPOTrainer`; collective."""
    args, processes, policy = trainer.args, trainer.processes, trainer.model
    pad = trainer._tokenizer.pad_token_id
    rows = _make_rows(trainer, trajectories)
    # as many rows in each process, and no uneven tail, which TRL's split_tensor_dict would drop
    num_splits = args.steps_per_generation if policy.training else 1
    most = max(processes.all_gather(len(rows)))
    num_rows = max(1, math.ceil(most / num_splits)) * num_splits
    padded = [*rows, *[padding_row(pad)] * (num_rows - len(rows))]
    collated = collate(padded, pad)
    tensors = {name: tensor.to(processes.device) for name, tensor in collated.items()}
    tokens = tensors["completion_ids"]
    weights = pad_like(loss_weights(rows, args.loss_denominator), tokens)
    tensors["staleness"] = pad_like(_staleness(rows, trajectories, trainer.state), tokens)
    tensors["loss_weights"] = processes.normalise(weights)
    tensors |= trainer.scorer.fixed_logprobs(policy, tensors)
    for extension in trainer.extensions if policy.training else ():
        tensors |= extension.batch_tensors(policy, trajectories, rows, tensors)

    own = [summarise(trajectory, reward_factors) for trajectory in trajectories]
    episodes = processes.all_gather_objects(own)
    first = processes.num_before(len(own))
    record = BatchRecord(trajectories=trajectories, rows=rows, tensors=tensors)
    credit, targets = trainer.assign_credit(record, episodes, first)

    advantages = credit[first : first + len(own)]
    masks = credit_masks(rows, actions_only=args.advantage_mask)
    num_steps = [len(episode.rewards) for episode in own]
    spread = spread_over_tokens(rows, masks, advantages, num_steps)
    tensors |= {"advantages": pad_like(spread, tokens), **targets}
    episodes = [
        dataclasses.replace(episode, has_signal=bool(np.any(values)))
        for episode, values in zip(episodes, credit, strict=True)
    ]
    return dataclasses.replace(record, advantages=advantages, episodes=episodes)


def _staleness(
    rows: Sequence[Row], trajectories: Sequence[Trajectory], state: Any
) -> list[list[int]]:
    """Return by how many updates the weights that sampled each token are older, shape (T,) each."""
    now = state.global_step
    ages = [
        [now - step.info.get("policy_version", now) for step in trajectory.transitions]
        for trajectory in trajectories
    ]
    return [[ages[row.episode][step] for step in row.steps] for row in rows]


def _make_rows(trainer: Any, trajectories: Sequence[Trajectory]) -> list[Row]:
    args, rows = trainer.args, []
    for i, trajectory in enumerate(trajectories):
        is_trained = all(extension.is_trained(trajectory) for extension in trainer.extensions)
        if not (trajectory.is_scorable and is_trained):
            continue
        own = make_rows(
            trajectory,
            i,
            merge=args.merge_steps,
            train_truncated=not args.mask_truncated_completions,
            train_observations=not args.loss_mask,
            train_summaries=args.train_summaries,
        )
        if len(own) > 1 and args.importance_sampling_level == "sequence":
            raise ConfigurationError(
                "importance_sampling_level='sequence' needs whole trajectories in a row, but a "
                "state did not extend the one before (see the context of the environment, and its "
                "chat template). Use 'step', or context='full'."
            )
        rows += own
    return rows
