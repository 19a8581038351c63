"""Scorer: log-probabilities of completion tokens, and the loss of the policy per token.

Equal rows go through the model once, and rows with the same prompt share its forward pass where
that saves enough. Dropout is on in the training pass, as in TRL, and off in all others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from accelerate.utils import is_peft_model
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import utils
from trl.trainer.utils import use_adapter

from agent_trainers.algorithms.losses import (
    evaluate_policy_loss,
    find_policy_loss,
    importance_log_ratio,
    kl_divergence,
    sampling_ratio,
)
from agent_trainers.batching.distributed import ProcessGroup
from agent_trainers.batching.micro_batch import MicroBatch, select_rows, split_into_micro_batches
from agent_trainers.batching.probe import drops_out, supports, without_dropout
from agent_trainers.batching.shared_prefix import (
    TokenScores,
    can_share,
    check_rows,
    find_groups,
    forward_rows,
    forward_shared,
    shares_rightly,
)
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.extensions import Extension

Batch = Mapping[str, torch.Tensor]
DRIFT: Final = "sampling/sampling_logp_difference/mean"
MAX_DRIFT: Final = "sampling/sampling_logp_difference/max"
MASKED: Final = "sampling/masked_trajectories"
MAX_KL_RATIO: Final = 3.0
"""Bound of the importance ratio that weighs the divergence, as in TRL."""


@contextmanager
def labelled_only() -> Iterator[None]:
    """Let the head of a model score labelled tokens only on a CPU, too.

    Relies on: TRL's fused head, which does so where it has Triton, and else scores all tokens.
    """
    has_triton = utils._use_triton
    utils._use_triton = lambda device: device.type == "cpu" or has_triton(device)
    try:
        yield
    finally:
        utils._use_triton = has_triton


class Scorer:
    """Scores batches, however large, one micro-batch at a time."""

    def __init__(self, trainer: Any) -> None:
        self.args: StepGRPOConfig = trainer.args
        self.processes: ProcessGroup = trainer.processes
        self.is_sharded: bool = trainer.generator.is_sharded
        """Whether weights are gathered in each pass, so that all processes must pass together."""
        self.drops_out = drops_out(trainer.model)
        """Whether the training pass has dropout, so that its log-probabilities show no drift."""
        self._accelerator, self._means = trainer.accelerator, trainer.means
        self._reference = trainer.ref_model  # if it is a separate one
        self._extensions: Sequence[Extension] = trainer.extensions
        elsewhere = self.args.use_vllm or self.args.num_steps_ahead > 0
        plain = trainer.generator.model.dtype == torch.float32 and not (
            elsewhere or self.drops_out or self._accelerator.mixed_precision != "no"
        )
        self.keeps_sampled: bool = (
            plain and self.args.loss_mask and trainer.generator.max_drift is not None
        )
        """Whether log-probabilities at sampling are those of the trainer up to rounding."""
        self._can_share = not self.is_sharded and self._check(trainer.generator.model)

    def _check(self, model: Any) -> bool:
        """Refuse an unwrapped model with wrong scores; return whether prompts can be shared."""
        temperature = self.args.temperature
        with self._accelerator.autocast(), labelled_only():
            if self.args.max_logprob_drift is not None:
                check_rows(model, temperature)
            return supports(model, lambda probe: shares_rightly(probe, body_of(model)), temperature)

    def micro_batches(self, batch: Batch, *, is_training: bool) -> Iterator[MicroBatch]:
        """Split a batch into micro-batches that fit the token budget."""
        train, evaluate = (
            self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size,
        )  # fmt: skip
        parts = split_into_micro_batches(
            batch,
            max_rows=train if is_training else evaluate,
            max_tokens=self.args.max_tokens_per_micro_batch,
        )
        if self.is_sharded:  # processes must pass together, some without rows
            parts = [*[[]] * (max(self.processes.all_gather(len(parts))) - len(parts)), *parts]
        for rows in parts:
            yield select_rows(batch, rows)

    def score(self, model: Any, micro_batch: MicroBatch) -> TokenScores:
        """Score the distinct rows of a micro-batch, (U, T), with a gradient.

        `model` is the policy or the reference, wrapped or not.
        """
        unwrapped, rows = self._accelerator.unwrap_model(model), micro_batch.forwarded
        with self._accelerator.autocast(), labelled_only():
            if self._can_share and can_share(unwrapped):
                width = rows["completion_ids"].size(1)
                groups = find_groups(rows["prompt_ids"], rows["prompt_mask"], width)
                if groups is not None:
                    return forward_shared(model, body_of(unwrapped), rows, groups)
            return forward_rows(model, rows)

    def logprobs(self, model: Any, batch: Batch, *, is_training: bool) -> torch.Tensor:
        """Return the log-probability of each completion token, (B, T), without a gradient."""
        return self.by_micro_batch(
            batch,
            lambda part: part.expand(self.score(model, part).logprobs),
            is_training=is_training,
        )

    @torch.no_grad()
    def by_micro_batch(
        self, batch: Batch, function: Callable[[MicroBatch], torch.Tensor], *, is_training: bool
    ) -> torch.Tensor:
        """Apply `function` to micro-batches; return its value of each completion token, (B, T)."""
        values = torch.zeros(batch["completion_ids"].shape, device=self._accelerator.device)
        for micro_batch in self.micro_batches(batch, is_training=is_training):
            part = function(micro_batch).float()
            if micro_batch.rows:
                values[micro_batch.rows, : part.size(1)] = part
        return values

    def fixed_logprobs(self, policy: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the log-probabilities that stay fixed while the policy trains on a batch.

        They are those of sampling, or computed without dropout, which would make them differ at
        equal weights.

        Returns:
            ``old_per_token_logps`` where the weights may differ from those that sampled,
            ``importance_sampling_ratio`` for another inference engine, ``ref_per_token_logps``
            with a reference; each (B, T).
        """
        args, fixed, is_training = self.args, {}, policy.training
        samples_elsewhere = args.use_vllm or args.num_steps_ahead > 0
        needs_correction = samples_elsewhere and args.vllm_importance_sampling_correction
        # whether some optimiser steps on a batch start with newer weights than the first
        is_trained_again = args.gradient_accumulation_steps % args.generate_every != 0
        with self._as_in_inference(policy):
            if is_trained_again and self.keeps_sampled:
                fixed["old_per_token_logps"] = batch["sampling_per_token_logps"]
            elif needs_correction or is_trained_again or self.drops_out:
                old = self.logprobs(policy, batch, is_training=is_training)
                self._record_drift(old, batch)
                if needs_correction or is_trained_again:
                    fixed["old_per_token_logps"] = old
                if needs_correction:
                    fixed["importance_sampling_ratio"] = self._importance_ratio(old, batch)
                    if args.num_steps_ahead:
                        # Clipping around the weights that sampled keeps stale batches from
                        # repeating the updates of the batches before.
                        sampled = batch["sampling_per_token_logps"]
                        is_known = sampled.isfinite() & batch["action_mask"].bool()
                        fixed["old_per_token_logps"] = torch.where(is_known, sampled, old)
                        kept = fixed["importance_sampling_ratio"] > 0.0
                        fixed["importance_sampling_ratio"] = kept.to(old.dtype)
            if args.beta != 0.0:
                with self._reference_for(policy) as reference:
                    fixed["ref_per_token_logps"] = self.logprobs(
                        reference, batch, is_training=is_training
                    )
        return fixed

    def evaluate_logprobs(self, policy: Any, batch: Batch) -> torch.Tensor:
        """Return log-probabilities under the current policy, (B, T), without side effects."""
        is_training = policy.training
        with self._as_in_inference(policy):
            return self.logprobs(policy, batch, is_training=is_training)

    def token_loss(self, micro_batch: MicroBatch, scores: TokenScores) -> torch.Tensor:
        """Return the unweighted loss of each token, (B, T).

        It is the policy loss, losses of extensions, and the KL divergence. `scores` are those of
        the distinct rows under the trained policy.
        """
        args, means = self.args, self._means
        mask, actions = micro_batch["tool_mask"], micro_batch["action_mask"]
        logprobs = micro_batch.expand(scores.logprobs)
        old = micro_batch.get("old_per_token_logps")
        if old is None:  # the weights are still those that sampled
            old = logprobs.detach()
            if not self.drops_out:
                self._record_drift(old, micro_batch)
        log_ratio = importance_log_ratio(
            logprobs - old,
            mask,
            micro_batch["steps"],
            micro_batch["trajectory_lengths"],
            args.importance_sampling_level,
        )
        policy = evaluate_policy_loss(
            find_policy_loss(args.loss_type),
            log_ratio=log_ratio,
            logprobs=logprobs,
            advantages=micro_batch["advantages"],
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            delta=args.delta,
        )
        loss = policy.loss
        for extension in self._extensions:
            loss = extension.token_loss(loss, micro_batch, logprobs, old)
        if (correction := micro_batch.get("importance_sampling_ratio")) is not None:
            loss = loss * correction
            ratio = (logprobs - old).exp() if args.num_steps_ahead else correction
            means.add_mean("sampling/importance_sampling_ratio/mean", ratio, actions)
        if (reference := micro_batch.get("ref_per_token_logps")) is not None:
            divergence = kl_divergence(logprobs, reference)
            means.add_mean("kl", divergence, actions)
            if args.use_bias_correction_kl:
                # the token's own ratio, whatever importance_sampling_level is
                divergence = divergence * (logprobs - old).exp().clamp(max=MAX_KL_RATIO)
            loss = loss + args.beta * divergence * actions
        if scores.entropies is not None:
            means.add_mean("entropy", micro_batch.expand(scores.entropies), actions)
        low, high = policy.is_clipped_low, policy.is_clipped_high
        for name, is_clipped in (("low", low), ("high", high), ("region", low | high)):
            means.add_mean(f"clip_ratio/{name}_mean", is_clipped, mask)
        return loss

    @contextmanager
    def _as_in_inference(self, policy: Any) -> Iterator[None]:
        options = self.args.gradient_checkpointing_kwargs
        with without_dropout(policy), disable_gradient_checkpointing(policy, options):
            yield

    def _importance_ratio(self, old: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return training over sampling probability of each token, shape (B, T), as TRL does.

        1 where a token was not sampled or has no log-probability from vLLM.
        """
        args, trajectories = self.args, batch["trajectories"]
        difference = (old - batch["sampling_per_token_logps"]) * batch["action_mask"]
        ratio = sampling_ratio(
            torch.nan_to_num(difference, nan=0.0),
            trajectories,
            args.vllm_importance_sampling_mode,
            low=args.vllm_importance_sampling_clip_min,
            high=args.vllm_importance_sampling_clip_max,
        )
        is_masked = (ratio == 0.0).all(dim=1)
        masked, everyone = {*trajectories[is_masked].tolist()}, {*trajectories.tolist()}
        self._means.add(MASKED, len(masked - {0}), len(everyone - {0}))
        return ratio

    @contextmanager
    def _reference_for(self, policy: Any) -> Iterator[Any]:
        if self._reference is not None:
            yield self._reference
            return
        # With an adapter TRL has no reference model: the reference is the model with its adapter
        # off, or with the copy "ref" of an adapter that is trained further.
        model = self._accelerator.unwrap_model(policy)
        assert is_peft_model(model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            yield policy

    def _record_drift(self, logprobs: torch.Tensor, batch: Batch) -> None:
        """Report how far log-probabilities (B, T) are from those of sampling with these weights."""
        sampled = batch["sampling_per_token_logps"]
        is_current = batch["staleness"] == 0
        mask = batch["action_mask"] * sampled.isfinite() * is_current  # vLLM leaves some out
        difference = torch.where(mask.bool(), (logprobs - sampled).abs(), 0.0)
        self._means.add_mean(DRIFT, difference, mask)
        self._means.add_maximum(MAX_DRIFT, float(difference.max()))


def body_of(model: Any) -> Any:
    """Return an unwrapped policy without its language-model head."""
    if is_peft_model(model):
        model = model.get_base_model()
    return model.base_model
