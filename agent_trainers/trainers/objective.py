"""Objective of the policy: policy loss, losses of extensions, and KL divergence, per token."""

from collections.abc import Sequence
from typing import Final

import torch

from agent_trainers.algorithms.losses import (
    evaluate_policy_loss,
    find_policy_loss,
    importance_log_ratio,
    kl_divergence,
)
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.batching.shared_prefix import TokenScores
from agent_trainers.monitoring.metrics_log import RunningMeans
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trainers.scorer import record_drift

MAX_KL_RATIO: Final = 3.0
"""Bound of the importance ratio that weighs the divergence, as in TRL."""


class PolicyObjective:
    """The loss of each token of a micro-batch."""

    def __init__(
        self,
        args: StepGRPOConfig,
        means: RunningMeans,
        *,
        drops_out: bool,
        extensions: Sequence[Extension] = (),
    ) -> None:
        """Follow the settings in `args`, and report to `means`.

        With `drops_out`, log-probabilities differ from the sampled ones by dropout alone.
        """
        self._args, self._means, self._drops_out = args, means, drops_out
        self._epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self._policy_loss = find_policy_loss(args.loss_type)
        self._extensions = extensions

    def __call__(self, micro_batch: MicroBatch, scores: TokenScores) -> torch.Tensor:
        """Return the unweighted loss of each token, (B, T).

        Args:
            micro_batch: Rows of a batch with their credit.
            scores: Scores of its distinct rows under the trained policy.
        """
        mask, actions = micro_batch["tool_mask"], micro_batch["action_mask"]
        logprobs = micro_batch.expand(scores.logprobs)
        old = micro_batch.get("old_per_token_logps")
        if old is None:  # the weights are still those that sampled
            old = logprobs.detach()
            if not self._drops_out:
                record_drift(self._means, old, micro_batch)
        log_ratio = importance_log_ratio(
            logprobs - old,
            mask,
            micro_batch["steps"],
            micro_batch["trajectory_lengths"],
            self._args.importance_sampling_level,
        )
        policy = evaluate_policy_loss(
            self._policy_loss,
            log_ratio=log_ratio,
            logprobs=logprobs,
            advantages=micro_batch["advantages"],
            epsilon_low=self._args.epsilon,
            epsilon_high=self._epsilon_high,
            delta=self._args.delta,
        )
        loss = policy.loss
        for extension in self._extensions:
            loss = extension.token_loss(loss, micro_batch, logprobs, old)
        if (correction := micro_batch.get("importance_sampling_ratio")) is not None:
            loss = loss * correction
            self._means.add_mean("sampling/importance_sampling_ratio/mean", correction, mask)
        if (reference := micro_batch.get("ref_per_token_logps")) is not None:
            divergence = kl_divergence(logprobs, reference)
            self._means.add_mean("kl", divergence, actions)
            if self._args.kl_placement == "loss":
                if self._args.use_bias_correction_kl:
                    # the token's own ratio, whatever importance_sampling_level is
                    divergence = divergence * (logprobs - old).exp().clamp(max=MAX_KL_RATIO)
                loss = loss + self._args.beta * divergence * actions
        if scores.entropies is not None:
            self._means.add_mean("entropy", micro_batch.expand(scores.entropies), actions)
        low, high = policy.is_clipped_low, policy.is_clipped_high
        for name, is_clipped in (("low", low), ("high", high), ("region", low | high)):
            self._means.add_mean(f"clip_ratio/{name}_mean", is_clipped, mask)
        return loss
