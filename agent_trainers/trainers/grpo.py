"""`StepGRPOTrainer`: GRPO on environment steps, on top of ``trl.GRPOTrainer``.

The path of a batch: `TrainerRollouts` collects trajectories, and `build_batch` makes tensors of
them with the help of `Scorer`, which also gives the loss. TRL provides models, PEFT, vLLM,
reference models, optimisation, logging and callbacks; its overridden methods are in one place
below, and each states what it relies on.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.algorithms.episodes import Array, apart
from agent_trainers.algorithms.reward_schedules import reward_factors
from agent_trainers.algorithms.roles import estimate_by_role
from agent_trainers.batching.distributed import ProcessGroup, without_sync
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.monitoring.episode_statistics import (
    EpisodeSummary,
    EvaluatedEnvironments,
    FaultWatch,
    count_faults,
    env_metrics,
    trainer_metrics,
)
from agent_trainers.monitoring.live_view import show_in_notebook
from agent_trainers.monitoring.metrics_log import MetricsLog, RunningMeans, StepClock
from agent_trainers.monitoring.trajectory_samples import BatchRecord
from agent_trainers.tasks.env_members import Member
from agent_trainers.tasks.samplers import TaskSampler
from agent_trainers.tasks.sources import (
    EnvironmentTasks,
    EnvLike,
    TaskSource,
    evaluation_rows,
    evaluation_source,
    task_source,
    training_pools,
    training_rows,
)
from agent_trainers.trainers.async_rollouts import AsyncRollouts
from agent_trainers.trainers.batch_builder import build_batch
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.extensions import Extension, make_extensions
from agent_trainers.trainers.generation import TrainerGenerator
from agent_trainers.trainers.resumable import ResumableTrainer
from agent_trainers.trainers.rollouts import TrainerRollouts
from agent_trainers.trainers.scorer import DRIFT, Scorer
from agent_trainers.trajectory import Trajectory


def _environment_reward(**_: Any) -> list[float]:
    """Placeholder of TRL's reward function; never called, since the environment gives rewards."""
    raise RuntimeError("TRL called the reward function although the environment gives rewards.")


class StepGRPOTrainer(ResumableTrainer):
    """Trains a language model by GRPO; each environment step is one transition."""

    args: StepGRPOConfig

    def __init__(
        self,
        model: Any,
        env: EnvLike,
        args: StepGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        eval_env: EnvLike | None = None,
        eval_envs: Sequence[Member] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> None:
        """Set up TRL's trainer, the environments and the rollouts.

        Args:
            model: A causal language model, or its name or path.
            env: A Gymnasium id, or a function that makes an environment, called once per concurrent
                episode. Or `ProgramTasks`: a program and its tasks. Or a list of environments,
                each an id or ``{"id": ..., "weight": ..., "kwargs": ..., "name": ..., "tasks":
                ...}``; see `EnvMember`.
            args: Settings.
            train_dataset: Rows with a column ``task``, the index of a task of `env`. All tasks of
                `env` by default; of an endless family, as many as ``max_steps`` needs.
            eval_dataset: The same for evaluation; with several environments also a column ``env``,
                the name of the environment.
            eval_env: The environment of evaluations, if it is not `env`.
            eval_envs: Further environments that are only evaluated, in the form of `env`.
            processing_class: The tokenizer; by default the model's.
            options: Further arguments of ``trl.GRPOTrainer``: ``callbacks``, ``optimizers``,
                ``peft_config``, ``quantization_config``.
        """
        args = args or StepGRPOConfig("step-grpo")
        extensions = make_extensions(args.extensions, args.advantage_estimator)
        source = task_source(env)
        eval_source = evaluation_source(env, eval_env, eval_envs)
        rows = training_rows(
            source,
            train_dataset,
            seed=args.seed,
            num_groups=args.num_train_groups,
            min_rows=args.generation_batch_size // args.num_generations,
        )
        sampler: TaskSampler | None = None
        if source.names or args.curriculum or args.max_extra_groups:
            pools = training_pools(source, train_dataset)
            sampler = TaskSampler(pools, args.seed, args.parsed_curriculum)
            if not args.shuffle_dataset:
                raise ConfigurationError(
                    "shuffle_dataset=False does nothing with several environments, a curriculum or "
                    "max_extra_groups, which draw tasks at random. Leave it out."
                )
        if args.use_vllm and args.use_cpu:
            require_extra("vllm", "use_vllm", "vllm")
            from agent_trainers.trainers.cpu_engine import use_cpu_engine

            use_cpu_engine()
        super().__init__(
            model=model,
            reward_funcs=[_environment_reward],
            args=args,
            train_dataset=rows,
            eval_dataset=evaluation_rows(eval_source or source, eval_dataset),
            processing_class=processing_class,
            **options,
        )
        if self._is_vlm:
            raise ConfigurationError("Vision-language models are not supported; pass a tokenizer.")
        for name in args.schedules if source.reward_terms is not None else ():
            lookup(source.reward_terms or {}, name, kind="scheduled reward term")
        self._compose(source, eval_source, sampler)
        self.last_batch: BatchRecord | None = None
        self.trajectories: dict[str, list[Trajectory]] = {"train": [], "eval": []}
        """This process's episodes: of the last batch in ``"train"``, and in ``"eval"`` of the last
        evaluation."""
        show_in_notebook(self)
        self._trained_beside: tuple[torch.nn.Module, ...] = ()
        """Models that are trained in addition to the policy."""
        for extension in extensions:
            extension.attach(self)

    def _compose(
        self, source: TaskSource, eval_source: TaskSource | None, sampler: TaskSampler | None
    ) -> None:
        args, self.source = self.args, source
        self.processes = ProcessGroup(self.accelerator)
        self.means = RunningMeans(self.processes)
        self.generator = TrainerGenerator(self)
        if args.sync_ref_model and self.generator.is_sharded:
            raise ConfigurationError(
                "sync_ref_model is not supported with FSDP and DeepSpeed, whose checkpoints would "
                "lack the reference. Leave it out, or use plain data parallelism."
            )
        self.extensions: list[Extension] = []
        self.keeping_state = dict[str, Any]() if sampler is None else {"draws": sampler}
        settings: dict[str, Any] = {
            "policy": self.generator.make_policy(source.tools),
            "step_timeout": args.step_timeout,
            "episode_timeout": args.episode_timeout,
            "is_any_active": self.processes.any if self.generator.is_collective else None,
        }
        rollouts, ahead = TrainerRollouts, dict[str, Any]()
        if args.num_steps_ahead:
            rollouts = AsyncRollouts
            ahead = {"policy": self.generator.make_ahead_policy(source.tools)}
        train = source.make_rollout(**settings | ahead)
        evaluate = train
        if ahead or eval_source is not None:
            evaluate = (eval_source or source).make_rollout(**settings)
        evaluated = eval_source or source
        names = [*dict.fromkeys([*source.names, *evaluated.names])]
        collectors = {"train": train, "eval": evaluate}
        self.rollouts = rollouts(self, collectors, sampler, names)
        if isinstance(self.rollouts, AsyncRollouts):
            self.keeping_state["rollouts"] = self.rollouts
        self.scorer = Scorer(self)
        variants = evaluated.variants if isinstance(evaluated, EnvironmentTasks) else ()
        self.evaluated = EvaluatedEnvironments(evaluated.names, variants, self.num_generations_eval)
        self._faults = FaultWatch(args.max_fault_share)
        self.clock = StepClock(self._metrics["train"])
        for callback in (self.clock, MetricsLog()):
            self.add_callback(callback)

    def assign_credit(
        self, batch: BatchRecord, episodes: Sequence[EpisodeSummary], first: int
    ) -> tuple[Sequence[Array], Mapping[str, torch.Tensor]]:
        """Estimate the advantages of all processes' episodes, each environment separately.

        `batch` is this process's; its first episode is number `first` of `episodes`. Collective.

        Returns:
            Advantages of all processes' episodes, one per step, (S,), or one per token, (N,); and
            this process's targets of a critic, (B, T).
        """
        settings = self.args.estimator_settings
        compare = functools.partial(estimate, self.args.advantage_estimator, **settings)
        by_role = functools.partial(estimate_by_role, compare)
        return apart(by_role, episodes, [episode.env for episode in episodes]), {}

    def current_logprobs(self) -> npt.NDArray[np.float32]:
        """Return log-probabilities of the last batch under the current policy, (B, T).

        Collective where the model is sharded: every process must call it.
        """
        assert self.last_batch is not None
        logprobs = self.scorer.evaluate_logprobs(self.model, self.last_batch.tensors)
        values: npt.NDArray[np.float32] = logprobs.cpu().numpy()
        return values

    # Overrides of TRL and transformers

    def create_accelerator_and_postprocess(self) -> None:
        """Keep scores and sums of gradients of a sharded model in float32, as without sharding.

        Accelerate's policy for FSDP2 rounds both to the precision of the computation. Relies on:
        called before any model is prepared.
        """
        super().create_accelerator_and_postprocess()
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        if policy is not None and plugin.fsdp_version == 2:
            plugin.mixed_precision_policy = dataclasses.replace(
                policy, output_dtype=None, reduce_dtype=torch.float32
            )

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, and close the environments; no optimiser step at all is an error.

        Relies on: called once per run.
        """
        try:
            output = super().train(*arguments, **options)
        finally:
            self.rollouts.close()
        if self.state.global_step == 0:
            raise ConfigurationError(
                "No optimiser step was taken. Check max_steps, num_train_epochs and the number of "
                "tasks."
            )
        return output

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate, and close the environments unless training continues with them.

        Relies on: `Trainer.evaluate` prepares a model if none was prepared before, without the
        wrapper that averages gradients, and Accelerate does not prepare a model twice, so each
        process would train separately. A sharded model is wrapped in evaluation, too.
        """
        size = self.args.per_device_eval_batch_size * self.accelerator.num_processes
        if size % self.num_generations_eval:
            raise ConfigurationError(
                f"per_device_eval_batch_size times processes ({size}) must be a multiple of "
                f"num_generations_eval ({self.num_generations_eval}), so that a batch holds whole "
                "groups."
            )
        self.trajectories["eval"] = []
        self.evaluated.clear()
        prepared, is_sharded = self.accelerator._models, self.generator.is_sharded
        is_held_back = self.accelerator.num_processes > 1 and not prepared and not is_sharded
        if is_held_back:
            prepared.append(self.model)
        try:
            return super().evaluate(*arguments, **options)
        finally:
            if is_held_back:
                prepared.remove(self.model)
            if not self.is_in_train:
                self.rollouts.close()

    def _set_signature_columns_if_needed(self) -> None:
        """Keep task and environment. Relies on: TRL drops all other columns."""
        self._signature_columns = ["task", "env"]

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Accumulate the gradient over smaller micro-batches, so that memory stays flat.

        Relies on: the `Trainer`'s method takes the gradient of the result of `_prepare_inputs`
        once; TRL's does the same and counts micro-batches and their time, to which the rest is
        added.
        """
        model.train()
        begun = time.perf_counter()
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.start(self._reward_factors())
        batch = self._prepare_inputs(inputs)
        # optimiser steps since sampling: before the batch was made, and since
        since = self.state.global_step - self._batch_made_at
        staleness = (batch["staleness"] + since) * batch["action_mask"]
        self.means.add_mean("sampling/staleness", staleness, batch["action_mask"])
        self.means.add_maximum("sampling/staleness_max", float(staleness.max()))
        if self.scorer.keeps_sampled and not since:  # then the loss checks them
            batch = {name: batch[name] for name in batch if name != "old_per_token_logps"}
        started = time.perf_counter()
        *others, last = self.scorer.micro_batches(batch, is_training=True)
        loss = torch.zeros((), device=self.accelerator.device)
        for micro_batch in others:
            with without_sync(self.accelerator, model, self._trained_beside):
                loss += Trainer.training_step(self, model, micro_batch, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - begun
        loss += super().training_step(model, last, num_items_in_batch)
        self._log_work([*others, last], time.perf_counter() - started)
        self._log_means("train")
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Pass our micro-batches through. Relies on: TRL generates, splits and buffers all else."""
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Collect the episodes of `inputs` and return their rows.

        Relies on: called with this process's share of a generation batch, one dict per episode,
        members of a group next to each other over all processes; the tensors it returns are
        shuffled and split along the first dimension, and read by ``_compute_loss``, which takes
        advantages of shape (B, T) and trains where ``completion_mask * tool_mask`` is 1.
        """
        mode = "train" if self.model.training else "eval"
        step = (self.state.global_step, self._step % self.args.gradient_accumulation_steps)
        factors = self._reward_factors() if mode == "train" else {}
        with self.clock.measure("rollout"), self.generator.rollout():
            trajectories, metrics, seconds = self.rollouts.collect(inputs, mode, step, factors)
        self.clock.note_generation(seconds)
        with self.clock.measure("score"):
            batch = build_batch(self, trajectories, factors)
            if mode == "train":
                self.last_batch, self._batch_made_at = batch, step[0]
                self.state.num_input_tokens_seen += sum(e.num_tokens for e in batch.episodes)
                self.trajectories["train"] = []
            self.trajectories[mode] += trajectories
            self._log_batch(mode, step[0] + 1, batch, factors)
            for name, value in metrics.items():
                self._metrics[mode][name].append(value)
        return dict(batch.tensors)

    def _reward_factors(self) -> Mapping[str, float]:
        progress = self.state.global_step / max(1, self.state.max_steps)
        return reward_factors(self.args.schedules, progress, self.state.log_history)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Read the rows of further optimiser steps, whose episodes start early.

        Relies on: called before each optimiser step with the iterator of the epoch.
        """
        if isinstance(self.rollouts, AsyncRollouts):
            epoch_iterator = self.rollouts.take(epoch_iterator, num_batches)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a micro-batch in training, of a whole batch in evaluation.

        Relies on: called for what `_prepare_inputs` returned, in training and in evaluation; the
        gradients of an accumulation window and of all processes are summed and divided by the
        number of processes.
        """
        if isinstance(inputs, MicroBatch):
            return self._micro_batch_loss(model, inputs)
        is_training = self.model.training
        loss = torch.zeros((), device=self.accelerator.device)
        for micro_batch in self.scorer.micro_batches(inputs, is_training=is_training):
            loss = loss + self._micro_batch_loss(model, micro_batch)
        self._log_means("train" if is_training else "eval")
        return loss

    # Loss

    def _micro_batch_loss(self, model: Any, micro_batch: MicroBatch) -> torch.Tensor:
        loss = self.scorer.token_loss(micro_batch, self.scorer.score(model, micro_batch))
        return self._reduce_loss(loss, micro_batch["loss_weights"])

    def _reduce_loss(self, loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum a loss per token so that an optimiser step gets its mean over the whole batch.

        The weights of a generation batch sum to 1 over all processes. The gradients of processes
        are averaged, and a generation batch may last several optimiser steps.
        """
        factor = float(self.accelerator.num_processes)
        if self.model.training:
            window = self.current_gradient_accumulation_steps
            factor *= self.args.steps_per_generation / window
        return (loss * weights).sum() * factor

    # Log

    def _log_batch(
        self, mode: str, step: int, batch: BatchRecord, factors: Mapping[str, float]
    ) -> None:
        """Log the statistics of a batch and the factors of its reward terms; collective."""
        own, episodes, terms = self._metrics[mode], batch.episodes, self.source.outcome_terms
        if mode == "eval":
            # of the whole evaluation so far, not a mean over batches
            so_far = self.evaluated.add(episodes, terms)
            own.update({name: [value] for name, value in so_far.items()})
            metrics = {}
        else:
            metrics = trainer_metrics(episodes, terms)
        if mode == "train":
            metrics |= env_metrics(episodes, self.source.names)
        metrics |= {f"reward_factor/{name}": factor for name, factor in factors.items()}
        for extension in self.extensions:
            metrics |= extension.metrics(mode, step, batch)
        for name, value in (metrics | count_faults(episodes)).items():
            own[name].append(value)
        own["num_tokens"] = [self.state.num_input_tokens_seen]
        self._faults.check(mode, episodes)

    def _log_work(self, micro_batches: Sequence[MicroBatch], seconds: float) -> None:
        """Record padding and throughput."""
        rows = [micro_batch.forwarded for micro_batch in micro_batches]
        forwarded = sum(r["prompt_ids"].numel() + r["completion_ids"].numel() for r in rows)
        real = sum(int(r["prompt_mask"].sum() + r["completion_mask"].sum()) for r in rows)
        trained = sum(int(micro_batch["tool_mask"].sum()) for micro_batch in micro_batches)
        self.means.add("rows/padding_share", forwarded - real, forwarded)
        self.means.add("rows/forwarded_per_trained_token", forwarded, trained)
        self.means.add("rows/tokens_per_second", real * self.processes.size, seconds)

    def _log_means(self, mode: str) -> None:
        """Log the means since the last call, and end the run if they drift; collective."""
        means = self.means.gather()
        for name, value in means.items():
            self._metrics[mode][name].append(value)
        limit, drift = self.generator.max_drift, means.get(DRIFT, 0.0)
        if limit is not None and drift > limit:
            raise ConfigurationError(
                f"The trainer's log-probabilities of the sampled tokens differ by {drift:.3g} nats "
                f"per token from those at sampling (max_logprob_drift: {limit:g}), so it does not "
                "see the same tokens or weights. Compare chat template, tokenizer and precision of "
                "both, and the weights of the server; or raise max_logprob_drift."
            )
