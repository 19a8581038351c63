"""`StepGRPOTrainer`: GRPO on environment steps, on top of ``trl.GRPOTrainer``.

Five methods of TRL are overridden here; what its checkpoints lack is in ``resumable.py``.
``tests/agent_trainers/test_trl_contract.py`` watches what both rely on. TRL keeps doing models,
PEFT, vLLM, reference models, log-probabilities, optimisation, logging and callbacks.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import TOKEN_LEVEL, Array, estimate
from agent_trainers.algorithms.losses import (
    cispo_loss,
    importance_log_ratio,
    kl_divergence,
    policy_loss,
)
from agent_trainers.algorithms.reward_schedules import reward_factors
from agent_trainers.batching.micro_batch import Piece, cut, take
from agent_trainers.batching.packing import RowGroups
from agent_trainers.batching.rows import (
    Row,
    collate,
    loss_weights,
    make_rows,
    num_rows_per_rank,
    pad_right,
    padding_row,
)
from agent_trainers.batching.shared_prefix import (
    can_share,
    find_groups,
    forward_rows,
    forward_shared,
)
from agent_trainers.monitoring.batch_record import BatchRecord
from agent_trainers.monitoring.episode_statistics import EpisodeSummary, summarise, trainer_metrics
from agent_trainers.monitoring.faults import count_faults
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.running_means import Shares
from agent_trainers.monitoring.step_clock import StepClock
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec, TextEnv
from agent_trainers.trainers.distributed import Ranks
from agent_trainers.trainers.episode_plan import all_tasks, check_tasks, plan_episodes
from agent_trainers.trainers.generation import TrainerSampler
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.resumable import ResumableTrainer
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]
DRIFT: Final = "sampling/sampling_logp_difference/mean"
MAX_DRIFT: Final = "sampling/sampling_logp_difference/max"


class StepGRPOTrainer(ResumableTrainer):
    """Trains a language model by GRPO; each environment step is one transition."""

    args: StepGRPOConfig

    def __init__(
        self,
        model: Any,
        env: str | MakeEnv,
        args: StepGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        eval_env: str | MakeEnv | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        """Set up TRL's trainer, the environments and the rollout.

        Args:
            model: A causal language model, or its name or path.
            env: A Gymnasium id, or a function that makes an environment; called once for each
                episode that runs at the same time.
            args: Settings.
            train_dataset: Rows with a column ``task``, the index of a task of `env`. All tasks of
                `env` if not given; of an endless family, as many as ``max_steps`` needs.
            eval_dataset: The same for evaluation.
            eval_env: Where to evaluate, if not in `env`.
            processing_class: The tokenizer; the model's own if not given.
            callbacks: As in TRL.
            optimizers: As in TRL.
            quantization_config: As in TRL.
            peft_config: As in TRL.

        Raises:
            ConfigurationError: If something is not supported; the message names it.
        """
        args = args or StepGRPOConfig("step-grpo")
        make_env = _env_maker(env)
        probe = make_env()
        if train_dataset is None:
            train_dataset = all_tasks(probe, args)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            check_tasks(name, dataset)
        super().__init__(
            model=model,
            reward_funcs=[environment_reward],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if self._is_vlm:
            raise ConfigurationError("Vision-language models are not supported; pass a tokenizer.")
        self._outcome_terms: frozenset[str] = getattr(probe.unwrapped, "outcome_terms", frozenset())
        _check_schedules(args, probe)
        self.ranks = Ranks(self.accelerator)
        self.shares = Shares(self.accelerator)
        self.sampler = TrainerSampler(self)
        self.clock = StepClock(self._metrics["train"])
        for callback in (self.clock, MetricsLog()):
            self.add_callback(callback)
        self.last_batch: BatchRecord | None = None
        self.trajectories: dict[str, list[Trajectory]] = {"train": [], "eval": []}
        self.advantages: dict[str, list[Any]] = {"train": [], "eval": []}
        self._last_evaluated_step: int | None = None
        policy = self.sampler.make_policy(probe)
        self._rollouts = {"train": self._make_rollout(make_env, policy)}
        self._rollouts["eval"] = (
            self._make_rollout(_env_maker(eval_env), policy)
            if eval_env is not None
            else self._rollouts["train"]
        )
        probe.close()

    def forget_trajectories(self, mode: str) -> None:
        """Drop what `trajectories` and `advantages` hold.

        They hold this process's episodes: the last batch in ``"train"``, and in ``"eval"`` all of
        the evaluations at the last optimiser step that had any.
        """
        self.trajectories[mode], self.advantages[mode] = [], []
        if mode == "eval":
            self._last_evaluated_step = self.state.global_step

    @torch.no_grad()
    def current_logprobs(self) -> npt.NDArray[np.float32]:
        """Return log-probabilities of the last batch under the policy as it is now, (B, T).

        Collective where the model is sharded: every process must call it.
        """
        assert self.last_batch is not None
        device = self.accelerator.device
        with (
            # to look at a run must not change it: dropout draws
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            logprobs = self._logprobs(self.model, self.last_batch.tensors)
        values: npt.NDArray[np.float32] = logprobs.float().cpu().numpy()
        return values

    # What is overridden

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column `task`. Relies on: TRL's own are the columns that a row may have."""
        self._signature_columns = ["task"]

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Add up the gradient of a micro-batch piece by piece, so that memory stays flat.

        Relies on: the `Trainer`'s own method takes the gradient of what `_prepare_inputs` returns,
        once; TRL's does that too and counts micro-batches and their time.
        """
        model.train()
        batch = self._prepare_inputs(inputs)
        generate_every = self.args.steps_per_generation * self.num_iterations
        staleness = self._step % generate_every // self.args.gradient_accumulation_steps
        started = time.perf_counter()
        *pieces, last = self._pieces(batch)
        loss = torch.zeros((), device=self.accelerator.device)
        for piece in pieces:
            with self._without_sync(model):
                loss += Trainer.training_step(self, model, piece, num_items_in_batch)
        loss += super().training_step(model, last, num_items_in_batch)
        self._note_work([*pieces, last], time.perf_counter() - started)
        self.shares.note("sampling/staleness", staleness)
        self._log_shares()
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Let a piece pass as it is. Relies on: TRL plays, splits and buffers everything else."""
        if isinstance(generation_batch, Piece):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the episodes of `inputs` and return their rows.

        Relies on: called with this process's share of a generation batch, one dict per episode,
        members of a group next to each other over all processes; the tensors it returns are
        shuffled and split along the first dimension, and read by ``_compute_loss``, which takes
        advantages of shape (B, T) and trains where ``completion_mask * tool_mask`` is 1.
        """
        mode = "train" if self.model.training else "eval"
        with self.clock.measure("rollout"):
            specs = self._episode_specs(inputs, mode)
            trajectories = self._rollouts[mode].collect(specs)
        self.clock.note_generation(sum(t.timings["generate_seconds"] for t in trajectories))
        with self.clock.measure("score"):
            return self._score(trajectories, mode)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a piece in training, of a whole batch in evaluation.

        TRL's own knows a ratio per token or per row, and a mean over tokens or rows; ours also
        knows steps and trajectories. Where both know a setting they agree, and a test says so.
        Relies on: called for what `_prepare_inputs` returned, in training and in evaluation; the
        gradients of an accumulation window and of all processes are summed and divided by the
        number of processes.
        """
        if isinstance(inputs, Piece):
            return self._piece_loss(model, inputs)
        loss = torch.zeros((), device=self.accelerator.device)
        for piece in self._pieces(inputs):
            loss = loss + self._piece_loss(model, piece)
        self._log_shares()
        return loss

    # The loss

    def _piece_loss(self, model: Any, inputs: Piece) -> torch.Tensor:
        """Return the policy loss of a piece: clipped policy gradient, or CISPO, and KL."""
        mask, actions = inputs["tool_mask"], inputs["action_mask"]
        logprobs, entropies, aux_loss = self._score_tokens(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        advantages = inputs["advantages"]
        old = inputs.get("old_per_token_logps")
        if old is None:  # the weights are still those that sampled
            self._note_drift(logprobs.detach(), inputs)
        log_ratio = importance_log_ratio(
            logprobs - (logprobs.detach() if old is None else old),
            mask,
            inputs["steps"],
            inputs["trajectory_lengths"],
            self.args.importance_sampling_level,
        )
        if self.args.loss_type == "cispo":
            policy = cispo_loss(log_ratio, logprobs, advantages, epsilon_high=self.epsilon_high)
        else:
            policy = policy_loss(
                log_ratio,
                advantages,
                epsilon_low=self.epsilon_low,
                epsilon_high=self.epsilon_high,
                delta=self.args.delta,
            )
        loss = policy.loss
        if (correction := inputs.get("importance_sampling_ratio")) is not None:
            loss = loss * correction
            self.shares.note_mean("sampling/importance_sampling_ratio/mean", correction, mask)
        if (reference := inputs.get("ref_per_token_logps")) is not None:
            divergence = kl_divergence(logprobs, reference)
            self.shares.note_mean("kl", divergence, actions)
            if self.args.kl_placement == "loss":
                if self.args.use_bias_correction_kl:
                    divergence = divergence * log_ratio.exp()
                loss = loss + self.beta * divergence * actions
        self.shares.note_mean("entropy", entropies, actions)
        self.shares.note_mean("clip_ratio/low_mean", policy.is_clipped_low, mask)
        self.shares.note_mean("clip_ratio/high_mean", policy.is_clipped_high, mask)
        self.shares.note_mean(
            "clip_ratio/region_mean", policy.is_clipped_low | policy.is_clipped_high, mask
        )
        total = self._reduce_loss(loss, inputs["loss_weights"])
        if self.aux_loss_enabled:
            window = self.current_gradient_accumulation_steps if self.model.training else 1
            total = total + self.router_aux_loss_coef * aux_loss / window
        return total

    def _reduce_loss(self, loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum a loss per token so that an optimiser step gets its mean over the whole batch.

        The weights of a generation batch sum to 1 over all processes; the gradients of processes
        are averaged, and a generation batch may be spread over several optimiser steps.
        """
        factor = float(self.accelerator.num_processes)
        if self.model.training:
            window = self.current_gradient_accumulation_steps
            factor *= self.args.steps_per_generation / window
        return (loss * weights).sum() * factor

    def _score_tokens(self, model: Any, piece: Piece, **options: Any) -> tuple[Any, Any, Any]:
        """Return log-probabilities and entropies of completions, (B, T), and the auxiliary loss.

        Rows that are equal go through the model once, and rows that begin with the same prompt
        share its forward pass where that saves enough.
        """
        logprobs, entropies, aux_loss = self._score_rows(model, piece.forwarded, **options)
        if entropies is not None:
            entropies = piece.spread(entropies)
        return piece.spread(logprobs), entropies, aux_loss

    def _score_rows(
        self, model: Any, rows: Mapping[str, torch.Tensor], **options: Any
    ) -> tuple[Any, Any, Any]:
        if options.get("compute_aux_loss"):  # it counts padding, which TRL masks
            scores: tuple[Any, Any, Any] = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),  # (B, P + T)
                torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
                rows["completion_ids"].size(1),
                **options,
            )
            return scores
        groups = self._prompt_groups(model, rows)
        with self.accelerator.autocast():
            if groups is None:
                return *forward_rows(model, rows), None
            body = body_of(self.accelerator.unwrap_model(model))
            return *forward_shared(model, body, rows, groups), None

    def _prompt_groups(self, model: Any, rows: Mapping[str, torch.Tensor]) -> RowGroups | None:
        """Return which rows share the pass over their prompt; None where it does not pay."""
        if self.sampler.is_sharded or not can_share(self.accelerator.unwrap_model(model)):
            return None
        width = rows["completion_ids"].size(1)
        return find_groups(rows["prompt_ids"], rows["prompt_mask"], width)

    def _note_work(self, pieces: Sequence[Piece], seconds: float) -> None:
        """Note how much of what went through the model was of use, and how fast it went."""
        rows = [piece.forwarded for piece in pieces]
        forwarded = sum(r["prompt_ids"].numel() + r["completion_ids"].numel() for r in rows)
        real = sum(int(r["prompt_mask"].sum() + r["completion_mask"].sum()) for r in rows)
        trained = sum(int(p["tool_mask"].sum()) for p in pieces)
        self.shares.note("rows/padding_share", forwarded - real, forwarded)
        self.shares.note("rows/forwarded_per_trained_token", forwarded, trained)
        self.shares.note("rows/tokens_per_second", real * self.accelerator.num_processes, seconds)

    def _note_drift(self, logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> None:
        """Note how far log-probabilities (B, T) are from those noted when tokens were sampled."""
        sampled = batch["sampling_per_token_logps"]
        mask = batch["action_mask"] * sampled.isfinite()  # vLLM leaves some out
        difference = torch.where(mask.bool(), (logprobs - sampled).abs(), 0.0)
        self.shares.note_mean(DRIFT, difference, mask)
        self.shares.note_maximum(MAX_DRIFT, float(difference.max()))

    def _log_shares(self) -> None:
        """Put what was noted where TRL's `log` finds it.

        Raises:
            ConfigurationError: If log-probabilities drift beyond `max_logprob_drift`.
        """
        mode = "train" if self.model.training else "eval"
        shares = self.shares.gather()
        for name, value in shares.items():
            self._metrics[mode][name].append(value)
        self.sampler.check_drift(shares.get(DRIFT, 0.0))

    # Pieces

    def _pieces(self, batch: Mapping[str, torch.Tensor]) -> list[Piece]:
        """Cut a micro-batch into pieces that fit the token budget."""
        return [self._take(batch, rows) for rows in self._in_step(self._cut(batch))]

    def _take(self, batch: Mapping[str, torch.Tensor], rows: list[int]) -> Piece:
        # The auxiliary loss of a mixture of experts looks at all tokens, copies too.
        return take(batch, rows, merge_equal=not self.aux_loss_enabled)

    def _in_step(self, cuts: list[list[int]]) -> list[list[int]]:
        """Add pieces without rows, where processes must pass through the model together."""
        if not self.sampler.is_sharded:
            return cuts
        missing = max(self.ranks.each(len(cuts))) - len(cuts)
        return [*[[]] * missing, *cuts]

    def _cut(self, batch: Mapping[str, torch.Tensor]) -> list[list[int]]:
        is_training = self.model.training
        return cut(
            batch,
            max_rows=self.args.per_device_train_batch_size
            if is_training
            else self.args.per_device_eval_batch_size,
            max_tokens=self.args.max_tokens_per_micro_batch,
        )

    @contextmanager
    def _without_sync(self, model: Any) -> Iterator[None]:
        """Add up gradients in this process only: another piece follows."""
        state = self.accelerator.gradient_state
        is_last = state.sync_gradients
        # In the midst of an accumulation window the `Trainer` holds its own model back already.
        held_back = self._trained_models(model) if is_last else self._trained_models(model)[1:]
        with ExitStack() as stack:
            state._set_sync_gradients(False)  # DeepSpeed steps where this is True
            stack.callback(state._set_sync_gradients, is_last)
            for trained in held_back:
                stack.enter_context(self.accelerator.no_sync(trained))
            yield

    def _trained_models(self, model: Any) -> tuple[Any, ...]:
        return (model,)

    # Credit

    def _score(self, trajectories: list[Trajectory], mode: str) -> dict[str, Any]:
        """Return the rows of what was played as tensors, with credit, and log what it was."""
        rows = self._make_rows(trajectories)
        batch = self._to_batch(rows, mode)
        factors = self._reward_factors() if mode == "train" else {}
        own = [summarise(trajectory, factors) for trajectory in trajectories]
        advantages = self._assign_credit(batch, rows, trajectories, own, mode)
        batch["advantages"] = self._per_token(rows, advantages, batch)
        if mode == "train":
            self.last_batch = BatchRecord(trajectories=trajectories, rows=rows, tensors=batch)
        if mode == "train" or self._last_evaluated_step != self.state.global_step:
            self.forget_trajectories(mode)
        self.trajectories[mode] += trajectories
        self.advantages[mode] += advantages
        self._log_episodes(mode, trajectories, own, advantages)
        self._log_reward_factors(factors)
        return batch

    def _make_rows(self, trajectories: Sequence[Trajectory]) -> list[Row]:
        rows: list[Row] = []
        for i, trajectory in enumerate(trajectories):
            if not trajectory.is_scorable:
                continue
            own = make_rows(
                trajectory,
                i,
                merge=self.args.merge_steps,
                train_truncated=not self.args.mask_truncated_completions,
                train_observations=not self.args.loss_mask,
            )
            if len(own) > 1 and self.args.importance_sampling_level == "sequence":
                raise ConfigurationError(
                    "importance_sampling_level='sequence' needs whole trajectories in a row, but "
                    "a state did not extend the one before (see the context of the environment, "
                    "and its chat template). Use 'step', or context='full'."
                )
            rows += own
        return rows

    def _assign_credit(
        self,
        batch: dict[str, Any],
        rows: Sequence[Row],
        trajectories: Sequence[Trajectory],
        own: Sequence[EpisodeSummary],
        mode: str,
    ) -> list[Array]:
        """Return the advantages of this process's trajectories."""
        return self._estimate(self._with_kl_in_reward(batch, rows, own))

    def _estimate(self, own: Sequence[EpisodeSummary], **options: Any) -> list[Array]:
        """Estimate advantages over the whole batch; return those of this process's episodes.

        Groups may be spread over processes, and some statistics are those of the batch.
        """
        episodes: list[EpisodeSummary] = gather_object(list(own))
        everything = estimate(
            self.args.advantage_estimator, episodes, **self.args.estimator_settings, **options
        )
        start = self.ranks.num_before(len(own))
        return everything[start : start + len(own)]

    def _with_kl_in_reward(
        self, batch: Mapping[str, torch.Tensor], rows: Sequence[Row], own: Sequence[EpisodeSummary]
    ) -> list[EpisodeSummary]:
        """Take beta times the divergence from the reference off each step's reward, if asked to.

        Per step ``sum_j log pi_old - log pi_ref`` over its sampled tokens (Ouyang et al., 2022,
        arXiv 2203.02155, eq. 2).
        """
        if self.args.kl_placement != "reward":
            return list(own)
        old = batch.get("old_per_token_logps", batch["sampling_per_token_logps"])
        divergence = ((old - batch["ref_per_token_logps"]) * batch["action_mask"]).cpu().numpy()
        rewards = [np.array(episode.rewards, float) for episode in own]
        for row, values in zip(rows, divergence, strict=False):  # padding rows come last
            np.subtract.at(rewards[row.episode], row.steps, self.beta * values[: len(row.steps)])
        return [
            dataclasses.replace(episode, rewards=tuple(values.tolist()))
            for episode, values in zip(own, rewards, strict=True)
        ]

    def _per_token(
        self, rows: Sequence[Row], values: Sequence[Array], batch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Spread a value per step, or per token, over the tokens of the rows; shape (B, T)."""
        is_per_token = self.args.advantage_estimator in TOKEN_LEVEL
        position = [0] * len(values)
        spread = []
        for row in rows:
            if not is_per_token:
                spread.append(values[row.episode][row.steps])
                continue
            takes_part = self._has_credit(row)
            start, count = position[row.episode], int(takes_part.sum())
            position[row.episode] += count
            tokens = np.zeros(len(takes_part), np.float32)
            tokens[takes_part] = values[row.episode][start : start + count]
            spread.append(tokens)
        return _fill_up(spread, batch)

    def _has_credit(self, row: Row) -> npt.NDArray[np.bool_]:
        """Return which tokens of a row have credit of their own, shape (T,)."""
        is_action = np.array(row.is_action, bool)
        return is_action if self.args.advantage_mask else np.ones_like(is_action)

    def _reward_factors(self) -> dict[str, float]:
        progress = self.state.global_step / max(1, self.state.max_steps)
        return reward_factors(self.args.schedules, progress, self.state.log_history)

    # Playing

    def _make_rollout(self, make_env: MakeEnv, policy: Policy) -> Rollout:
        return Rollout(
            make_env,
            policy,
            step_timeout=self.args.step_timeout,
            episode_timeout=self.args.episode_timeout,
            group_quorum=self.args.group_quorum,
            is_any_active=self.ranks.any if self.sampler.is_collective else None,
        )

    def _episode_specs(self, inputs: Sequence[Mapping[str, Any]], mode: str) -> list[EpisodeSpec]:
        is_training = mode == "train"
        return plan_episodes(
            inputs,
            mode=mode,
            first=self.ranks.num_before(len(inputs)),
            group_size=self.num_generations if is_training else self.num_generations_eval,
            seed=self.args.seed,
            step=(self.state.global_step, self._step % self.args.gradient_accumulation_steps),
        )

    # Rows to tensors

    def _to_batch(self, rows: list[Row], mode: str) -> dict[str, Any]:
        """Pad this process's rows to the number all processes hold, and add log-probabilities."""
        num_splits = self.args.steps_per_generation if mode == "train" else 1
        num_rows = num_rows_per_rank(self.ranks.each(len(rows)), num_splits)
        pad_token_id = self._tokenizer.pad_token_id
        rows = [*rows, *[padding_row(pad_token_id)] * (num_rows - len(rows))]
        batch: dict[str, Any] = {
            name: tensor.to(self.accelerator.device)
            for name, tensor in collate(rows, pad_token_id, self.pad_to_multiple_of).items()
        }
        batch["loss_weights"] = self._weights(loss_weights(rows, self.args.loss_denominator), batch)
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            self._add_old_logprobs(batch)
            if self.beta != 0.0:
                batch["ref_per_token_logps"] = self._reference_logprobs(batch)
        return batch

    def _weights(
        self, weights: Sequence[npt.NDArray[np.float64]], batch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return weights per token that sum to 1 over all processes, shape (B, T)."""
        tensor = _fill_up(weights, batch)
        total = self.accelerator.reduce(tensor.sum(), reduction="sum")
        weighed: torch.Tensor = tensor / total.clamp(min=1.0)
        return weighed

    def _add_old_logprobs(self, batch: dict[str, Any]) -> None:
        """Add what TRL's loss needs where the policy that sampled is not the one that trains."""
        is_other_engine = self.use_vllm or self.use_transformers_continuous_batching
        uses_correction = is_other_engine and self.vllm_importance_sampling_correction
        generate_every = self.args.steps_per_generation * self.num_iterations
        if not uses_correction and self.args.gradient_accumulation_steps % generate_every == 0:
            return
        batch["old_per_token_logps"] = self._logprobs(self.model, batch)
        self._note_drift(batch["old_per_token_logps"], batch)
        if uses_correction:
            batch["importance_sampling_ratio"] = self._importance_ratio(batch)

    def _importance_ratio(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return training over sampling probability of each token, shape (B, T), as TRL does.

        1 where a token is not trained or vLLM gave no log-probability.
        """
        difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
        ratio = torch.exp(torch.nan_to_num(difference * batch["tool_mask"], nan=0.0))
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if self.vllm_importance_sampling_mode == "token_truncate":
            return ratio.clamp(min=low, max=high)
        is_outside = torch.zeros_like(ratio, dtype=torch.bool)
        if low is not None:
            is_outside |= ratio < low
        if high is not None:
            is_outside |= ratio > high
        return ratio.masked_fill(is_outside, 0.0)

    def _reference_logprobs(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logprobs(self.ref_model, batch)
        # TRL keeps no reference model beside an adapter: switched off (or, for an adapter that is
        # trained further, its copy "ref") the model is the reference.
        model = self.accelerator.unwrap_model(self.model)
        assert is_peft_model(model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logprobs(self.model, batch)

    def _logprobs(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probability of each completion token, shape (B, T)."""

        def logprobs_of(piece: Piece) -> torch.Tensor:
            logprobs, _, _ = self._score_tokens(model, piece)
            assert isinstance(logprobs, torch.Tensor)
            return logprobs

        return self._by_piece(batch, logprobs_of)

    def _by_piece(
        self, batch: Mapping[str, torch.Tensor], function: Callable[[Piece], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `function` gives for each completion token, piece by piece; (B, T)."""
        values = torch.zeros(batch["completion_ids"].shape, device=self.accelerator.device)
        for rows in self._in_step(self._cut(batch)):
            piece = function(self._take(batch, rows)).float()
            if rows:
                values[rows, : piece.size(1)] = piece
        return values

    # Logging

    def _log_episodes(
        self,
        mode: str,
        trajectories: Sequence[Trajectory],
        own: Sequence[EpisodeSummary],
        own_advantages: Sequence[Array],
    ) -> None:
        """Put the statistics of the whole batch where TRL's `log` finds them."""
        episodes: list[EpisodeSummary] = gather_object(list(own))
        advantages: list[Array] = gather_object(list(own_advantages))
        for name, value in trainer_metrics(episodes, advantages, self._outcome_terms).items():
            self._metrics[mode][name].append(value)
        faults: list[dict[str, int]] = gather_object([count_faults(trajectories)])
        for name in faults[0]:
            self._metrics[mode][f"faults/{name}"].append(sum(counts[name] for counts in faults))
        if mode == "train":
            self.state.num_input_tokens_seen += sum(episode.num_tokens for episode in episodes)
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        if not self.log_completions:
            return
        played = gather_object([_as_conversation(t) for t in trajectories])
        self._logs["prompt"].extend(prompt for prompt, _ in played)
        self._logs["completion"].extend(completion for _, completion in played)
        self._logs["advantages"].extend(float(np.mean(a)) if len(a) else 0.0 for a in advantages)
        for name in sorted({name for episode in episodes for name in episode.reward_terms}):
            values = [episode.reward_terms.get(name, 0.0) for episode in episodes]
            self._logs["rewards"][name].extend(values)

    def _log_reward_factors(self, factors: Mapping[str, float]) -> None:
        for name, factor in factors.items():
            self._metrics["train"][f"reward_factor/{name}"].append(factor)


def body_of(model: Any) -> Any:
    """Return an unwrapped policy without its language-model head."""
    if is_peft_model(model):
        model = model.get_base_model()
    return model.base_model


def environment_reward(**_: Any) -> list[float]:
    """Stand in the place where TRL wants a reward function; the environment owns the reward.

    Raises:
        RuntimeError: Always. TRL must not call it: `_generate_and_score_completions` is overridden.
    """
    raise RuntimeError("TRL asked for a reward although the environment gives it.")


def _env_maker(env: str | MakeEnv) -> MakeEnv:
    if not isinstance(env, str) and not callable(env):
        raise ConfigurationError(
            "env is an environment, but each episode of a batch needs one of its own: pass its id, "
            "or a function that makes it, such as lambda: gym.make(...)."
        )
    return functools.partial(gym.make, env) if isinstance(env, str) else env


def _check_schedules(args: StepGRPOConfig, env: TextEnv) -> None:
    weights = getattr(env.unwrapped, "reward_weights", None)
    if weights is not None:
        for name in args.schedules:
            lookup(weights, name, kind="scheduled reward term")


def _fill_up(values: Sequence[npt.NDArray[Any]], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return values per token of the first rows as (B, T); 0 for padding and for padding rows."""
    tokens = batch["completion_ids"]
    rows = [row.tolist() for row in values]
    padding: list[list[float]] = [[]] * (tokens.size(0) - len(rows))
    return pad_right([*rows, *padding], tokens.size(1)).to(tokens.device)


def _as_conversation(trajectory: Trajectory) -> tuple[list[Any], list[Any]]:
    """Return a trajectory as TRL's completion log wants it: prompt and completion messages."""
    if not trajectory.transitions:
        return [], []
    first, last = trajectory.transitions[0], trajectory.transitions[-1]
    later = last.messages[len(first.messages) :]
    return list(first.messages), [*later, {"role": "assistant", "content": last.action}]
