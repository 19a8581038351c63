"""Log-probabilities of completion tokens: of the policy that trains, that sampled, that refers.

Rows that are equal go through the model once, and rows that begin with the same prompt share its
forward pass where that saves enough.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from accelerate.utils import is_peft_model
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from agent_trainers.batching.micro_batch import (
    MicroBatch,
    select_rows,
    split_into_micro_batches,
)
from agent_trainers.batching.shared_prefix import (
    TokenScores,
    can_share,
    find_groups,
    forward_rows,
    forward_shared,
)
from agent_trainers.monitoring.running_means import RunningMeans
from agent_trainers.trainers.distributed import ProcessGroup
from agent_trainers.trainers.grpo_config import StepGRPOConfig

Batch = Mapping[str, torch.Tensor]
DRIFT: Final = "sampling/sampling_logp_difference/mean"
MAX_DRIFT: Final = "sampling/sampling_logp_difference/max"


class Scorer:
    """Computes log-probabilities of batches, however large, one micro-batch at a time."""

    def __init__(
        self,
        args: StepGRPOConfig,
        accelerator: Any,
        means: RunningMeans,
        *,
        is_sharded: bool,
        reference: Any = None,
        score_with_aux_loss: Callable[..., tuple[Any, Any, Any]] | None = None,
    ) -> None:
        """Prepare to score.

        Args:
            args: Settings.
            accelerator: Accelerate's.
            means: Where drift is noted.
            is_sharded: Whether weights are gathered in each pass, so that processes must pass in
                step.
            reference: The reference model, if it is one of its own.
            score_with_aux_loss: TRL's ``_get_per_token_logps_and_entropies``, where a mixture of
                experts adds the loss of its router.
        """
        self._args, self._accelerator, self._means = args, accelerator, means
        self._processes = ProcessGroup(accelerator)
        self._is_sharded = is_sharded
        self._reference = reference
        self._score_with_aux_loss = score_with_aux_loss

    def micro_batches(self, batch: Batch, *, is_training: bool) -> list[MicroBatch]:
        """Split a batch into micro-batches that fit the token budget."""
        return [self._select(batch, rows) for rows in self._split(batch, is_training=is_training)]

    def score(
        self, model: Any, micro_batch: MicroBatch, *, with_aux_loss: bool = False
    ) -> TokenScores:
        """Score the completions of a micro-batch, with a gradient.

        Args:
            model: The policy or the reference, wrapped or not.
            micro_batch: Rows.
            with_aux_loss: Whether the auxiliary loss is wanted, where the model has one.

        Returns:
            Scores of the rows that differ, (U, T): see `MicroBatch.expand`.
        """
        if with_aux_loss and self._score_with_aux_loss is not None:
            return self._score_in_trls_layout(model, micro_batch.forwarded)
        with self._accelerator.autocast():
            return self._score_rows(model, micro_batch.forwarded)

    def logprobs(self, model: Any, batch: Batch, *, is_training: bool) -> torch.Tensor:
        """Return the log-probability of each completion token, (B, T), without a gradient."""

        def logprobs_of(micro_batch: MicroBatch) -> torch.Tensor:
            return micro_batch.expand(self.score(model, micro_batch).logprobs)

        return self.by_micro_batch(batch, logprobs_of, is_training=is_training)

    @torch.no_grad()
    def by_micro_batch(
        self, batch: Batch, function: Callable[[MicroBatch], torch.Tensor], *, is_training: bool
    ) -> torch.Tensor:
        """Return what `function` gives for each completion token, (B, T)."""
        values = torch.zeros(batch["completion_ids"].shape, device=self._accelerator.device)
        for rows in self._split(batch, is_training=is_training):
            part = function(self._select(batch, rows)).float()
            if rows:
                values[rows, : part.size(1)] = part
        return values

    def fixed_logprobs(self, policy: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what the loss compares the policy with while it learns from a batch.

        Args:
            policy: The model as it is before it learns from the batch.
            batch: See `collate`.

        Returns:
            ``old_per_token_logps`` where the policy that trains is not the one that sampled,
            ``importance_sampling_ratio`` where its probabilities differ, ``ref_per_token_logps``
            where there is a reference; each (B, T).
        """
        fixed = {}
        is_training = policy.training
        with disable_gradient_checkpointing(policy, self._args.gradient_checkpointing_kwargs):
            if self._needs_correction or self._trains_more_than_once:
                old = self.logprobs(policy, batch, is_training=is_training)
                note_drift(self._means, old, batch)
                fixed["old_per_token_logps"] = old
                if self._needs_correction:
                    fixed["importance_sampling_ratio"] = self._importance_ratio(old, batch)
            if self._args.beta != 0.0:
                with self._reference_for(policy) as reference:
                    fixed["ref_per_token_logps"] = self.logprobs(
                        reference, batch, is_training=is_training
                    )
        return fixed

    def look(self, policy: Any, batch: Batch) -> torch.Tensor:
        """Return log-probabilities under the policy as it is now, (B, T), and change nothing."""
        device = self._accelerator.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),  # dropout draws
            disable_gradient_checkpointing(policy, self._args.gradient_checkpointing_kwargs),
        ):
            return self.logprobs(policy, batch, is_training=policy.training)

    def _split(self, batch: Batch, *, is_training: bool) -> list[list[int]]:
        rows = split_into_micro_batches(
            batch,
            max_rows=self._args.per_device_train_batch_size
            if is_training
            else self._args.per_device_eval_batch_size,
            max_tokens=self._args.max_tokens_per_micro_batch,
        )
        if not self._is_sharded:
            return rows
        # Processes must pass through the model together: some without rows.
        return [*[[]] * (max(self._processes.all_gather(len(rows))) - len(rows)), *rows]

    def _select(self, batch: Batch, rows: list[int]) -> MicroBatch:
        # The auxiliary loss of a mixture of experts looks at all tokens, copies too.
        return select_rows(batch, rows, merge_equal=self._score_with_aux_loss is None)

    def _score_rows(self, model: Any, rows: Batch) -> TokenScores:
        unwrapped = self._accelerator.unwrap_model(model)
        groups = None
        if not self._is_sharded and can_share(unwrapped):
            width = rows["completion_ids"].size(1)
            groups = find_groups(rows["prompt_ids"], rows["prompt_mask"], width)
        if groups is None:
            return forward_rows(model, rows)
        return forward_shared(model, body_of(unwrapped), rows, groups)

    def _score_in_trls_layout(self, model: Any, rows: Batch) -> TokenScores:
        """Score rows flush right, which the auxiliary loss needs: it counts padding unmasked."""
        assert self._score_with_aux_loss is not None
        prompt_width, width = rows["prompt_ids"].size(1), rows["completion_ids"].size(1)
        logprobs, entropies, aux_loss = self._score_with_aux_loss(
            model,
            torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),  # (B, P + T)
            torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
            width,
            compute_entropy=True,
            compute_aux_loss=True,
        )
        places = torch.arange(width, device=logprobs.device) + prompt_width - 1
        return TokenScores(logprobs, entropies, places.expand(len(logprobs), width), aux_loss)

    @property
    def _needs_correction(self) -> bool:
        """Whether another engine sampled, whose probabilities differ a little."""
        is_other = self._args.use_vllm or self._args.use_transformers_continuous_batching
        return bool(is_other and self._args.vllm_importance_sampling_correction)

    @property
    def _trains_more_than_once(self) -> bool:
        """Whether some steps on a batch begin with other weights than those that sampled it."""
        generate_every = self._args.steps_per_generation * self._args.num_iterations
        return bool(self._args.gradient_accumulation_steps % generate_every != 0)

    def _importance_ratio(self, old: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return training over sampling probability of each token, shape (B, T), as TRL does.

        1 where a token is not trained or vLLM gave no log-probability.
        """
        difference = old - batch["sampling_per_token_logps"]
        ratio = torch.exp(torch.nan_to_num(difference * batch["tool_mask"], nan=0.0))
        low = self._args.vllm_importance_sampling_clip_min
        high = self._args.vllm_importance_sampling_clip_max
        if self._args.vllm_importance_sampling_mode == "token_truncate":
            return ratio.clamp(min=low, max=high)
        is_outside = torch.zeros_like(ratio, dtype=torch.bool)
        if low is not None:
            is_outside |= ratio < low
        if high is not None:
            is_outside |= ratio > high
        return ratio.masked_fill(is_outside, 0.0)

    @contextmanager
    def _reference_for(self, policy: Any) -> Iterator[Any]:
        if self._reference is not None:
            yield self._reference
            return
        # TRL keeps no reference model beside an adapter: switched off (or, for an adapter that is
        # trained further, its copy "ref") the model is the reference.
        model = self._accelerator.unwrap_model(policy)
        assert is_peft_model(model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            yield policy


def note_drift(means: RunningMeans, logprobs: torch.Tensor, batch: Batch) -> None:
    """Note how far log-probabilities (B, T) are from those noted when tokens were sampled."""
    sampled = batch["sampling_per_token_logps"]
    mask = batch["action_mask"] * sampled.isfinite()  # vLLM leaves some out
    difference = torch.where(mask.bool(), (logprobs - sampled).abs(), 0.0)
    means.add_mean(DRIFT, difference, mask)
    means.add_maximum(MAX_DRIFT, float(difference.max()))


def body_of(model: Any) -> Any:
    """Return an unwrapped policy without its language-model head."""
    if is_peft_model(model):
        model = model.get_base_model()
    return model.base_model
