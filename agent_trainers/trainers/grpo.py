"""`StepGRPOTrainer`: GRPO on environment steps, on top of ``trl.GRPOTrainer``.

A batch goes one way: `EpisodePlayer` plays trajectories, `BatchBuilder` makes tensors of them with
the help of `Scorer`, the loss is taken of those here, and `TrainingLog` reports. TRL keeps doing
models, PEFT, vLLM, reference models, optimisation, logging and callbacks; five of its methods are
overridden, and ``tests/agent_trainers/trainers/test_trl_contract.py`` watches what that relies on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.reward_schedules import reward_factors
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.batching.shared_prefix import TokenScores
from agent_trainers.experimental.hack_watch.hack_watch import HackWatch
from agent_trainers.experimental.skills.skill_teacher import SkillTeacher
from agent_trainers.monitoring.batch_record import BatchRecord
from agent_trainers.monitoring.env_statistics import EvaluatedEnvironments
from agent_trainers.monitoring.faults import FaultWatch
from agent_trainers.monitoring.live_view import show_in_notebook
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.running_means import RunningMeans
from agent_trainers.monitoring.step_clock import StepClock
from agent_trainers.policies.local import context_length
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.tasks.curriculum import CurriculumDraws
from agent_trainers.tasks.env_members import Member
from agent_trainers.tasks.task_draws import TaskDraws
from agent_trainers.trainers.batch_builder import BatchBuilder
from agent_trainers.trainers.distributed import ProcessGroup, without_sync
from agent_trainers.trainers.dropout import disable_attention_dropout, drops_out
from agent_trainers.trainers.dynamic_sampling import ResultFollower
from agent_trainers.trainers.env_mixture import (
    EnvMixture,
    Played,
    measured_rows,
    measured_source,
    task_source,
    training_draws,
    training_rows,
    with_levels,
)
from agent_trainers.trainers.episode_plan import (
    EpisodePlayer,
    TaskSource,
    check_schedules,
    environment_reward,
)
from agent_trainers.trainers.generation import sampler_of
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.objective import PolicyObjective
from agent_trainers.trainers.resumable import ResumableTrainer
from agent_trainers.trainers.scorer import Scorer
from agent_trainers.trainers.training_log import TrainingLog
from agent_trainers.trajectory import Trajectory

_TRL_LOGGER: Final = logging.getLogger("trl.trainer.grpo_trainer")


def _is_true_here(record: logging.LogRecord) -> bool:
    """Keep back TRL's advice on GSPO: what a loss is a mean over, `loss_denominator` says here."""
    return "set `loss_type='grpo'`" not in record.getMessage()


def _names(source: TaskSource | None) -> Sequence[str]:
    """Return the names of the environments of a source; none where it is one alone."""
    return source.names if isinstance(source, EnvMixture) else ()


class StepGRPOTrainer(ResumableTrainer):
    """Trains a language model by GRPO; each environment step is one transition."""

    args: StepGRPOConfig

    def __init__(
        self,
        model: Any,
        env: Played,
        args: StepGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        eval_env: Played | None = None,
        eval_envs: Sequence[Member] | None = None,
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
                episode that runs at the same time. Or `ProgramTasks`: a program and its tasks. Or a
                list of environments that are trained in together, each an id or ``{"id": ...,
                "weight": ..., "kwargs": ..., "name": ..., "tasks": ...}``; see `EnvMember`.
            args: Settings.
            train_dataset: Rows with a column ``task``, the index of a task of `env`. All tasks of
                `env` if not given; of an endless family, as many as ``max_steps`` needs.
            eval_dataset: The same for evaluation; of several environments with a column ``env``,
                too, the name of the environment.
            eval_env: Where to evaluate, if not in `env`.
            eval_envs: Environments that are evaluated as well and never trained in, as in a list of
                `env`: what was learned is to be of use there, too.
            processing_class: The tokenizer; the model's own if not given.
            callbacks: As in TRL.
            optimizers: As in TRL.
            quantization_config: As in TRL.
            peft_config: As in TRL.

        Raises:
            ConfigurationError: If something is not supported; the message names it.
        """
        args = args or StepGRPOConfig("step-grpo")
        played, train_dataset = with_levels(env, train_dataset, args.parsed_curriculum)
        if played is not env and eval_env is None:
            eval_env = env
        source = task_source(played)
        eval_source = measured_source(played, eval_env, eval_envs)
        draws = training_draws(source, train_dataset, args)
        train_dataset = training_rows(source, train_dataset, args)
        eval_dataset = measured_rows(eval_source or source, eval_dataset)
        _TRL_LOGGER.addFilter(_is_true_here)
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
        if args.disable_dropout:
            disable_attention_dropout(self.model)
        check_schedules(args, source)
        self._compose(source, eval_source, draws)
        self.last_batch: BatchRecord | None = None
        self.trajectories: dict[str, list[Trajectory]] = {"train": [], "eval": []}
        self._last_evaluated_step: int | None = None
        show_in_notebook(self)
        self._trained_beside: tuple[torch.nn.Module, ...] = ()
        """Models that are trained beside the policy."""

    def _compose(
        self, source: TaskSource, eval_source: TaskSource | None, draws: TaskDraws | None
    ) -> None:
        """Make the objects that play, score, build and report."""
        self.processes = ProcessGroup(self.accelerator)
        self.means = RunningMeans(self.accelerator)
        self.sampler = sampler_of(self)
        settings: dict[str, Any] = {
            "policy": self.sampler.make_policy(source.tools),
            "step_timeout": self.args.step_timeout,
            "episode_timeout": self.args.episode_timeout,
            "group_quorum": self.args.group_quorum,
            "is_any_active": self.processes.any if self.sampler.is_collective else None,
        }
        train = source.make_rollout(**settings)
        evaluate = train if eval_source is None else eval_source.make_rollout(**settings)
        self.player = EpisodePlayer(
            self.args,
            self.processes,
            {"train": self.num_generations, "eval": self.num_generations_eval},
            {"train": train, "eval": evaluate},
            draws=draws,
            env_names=[*dict.fromkeys([*_names(source), *_names(eval_source)])],
        )
        self.follower: ResultFollower | None = None
        if self.args.max_extra_groups or isinstance(draws, CurriculumDraws):
            budget = self.args.max_extra_groups
            self.follower = ResultFollower(self.player, self.processes, budget)
        self.scorer = Scorer(
            args=self.args,
            processes=self.processes,
            accelerator=self.accelerator,
            means=self.means,
            is_sharded=self.sampler.is_sharded,
            reference=self.ref_model,
            drops_out=drops_out(self.model),
            balances_experts=self.aux_loss_enabled,
        )
        self.objective = PolicyObjective(self.args, self.means, drops_out=self.scorer.drops_out)
        pad_token_id = self._tokenizer.pad_token_id
        teacher = None
        if self.args.skill_weight > 0.0:
            teacher = SkillTeacher(
                source=self.args.skills,
                is_reference=self.args.skill_teacher == "reference",
                scorer=self.scorer,
                renderer=ChatRenderer(self._tokenizer, self.args.chat_template_kwargs or {}),
                max_tokens=context_length(self.sampler.model),
            )
        self.builder = BatchBuilder(self.args, self.processes, self.scorer, pad_token_id, teacher)
        self.watch = HackWatch()
        self.keeping_state = {"watch": self.watch, **({} if draws is None else {"draws": draws})}
        self.training_log = TrainingLog(
            means=self.means,
            processes=self.processes,
            metrics=self._metrics,
            texts=self._logs if self.log_completions else None,
            outcome_terms=source.outcome_terms,
            faults=FaultWatch(self.args.max_fault_share),
            watch=self.watch,
            env_names=_names(source),
            evaluated=EvaluatedEnvironments(
                measured.names, measured.variants, self.num_generations_eval
            )
            if isinstance(measured := eval_source or source, EnvMixture)
            else None,
            max_drift=self.sampler.max_drift,
        )
        self.clock = StepClock(self._metrics["train"])
        for callback in (self.clock, MetricsLog()):
            self.add_callback(callback)

    def forget_trajectories(self, mode: str) -> None:
        """Drop what `trajectories` holds.

        It holds this process's episodes: the last batch in ``"train"``, and in ``"eval"`` all of
        the evaluations at the last optimiser step that had any.
        """
        self.trajectories[mode] = []
        if mode == "eval":
            self._last_evaluated_step = self.state.global_step

    def current_logprobs(self) -> npt.NDArray[np.float32]:
        """Return log-probabilities of the last batch under the policy as it is now, (B, T).

        Collective where the model is sharded: every process must call it.
        """
        assert self.last_batch is not None
        logprobs = self.scorer.look(self.model, self.last_batch.tensors)
        values: npt.NDArray[np.float32] = logprobs.cpu().numpy()
        return values

    # What is overridden

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, and close the environments. Relies on: called once per run."""
        try:
            return super().train(*arguments, **options)
        finally:
            self.player.close()

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate; close the environments unless training goes on with them."""
        forward = self.model.forward
        try:
            return super().evaluate(*arguments, **options)
        finally:
            if not self.is_in_train:
                self.player.close()
                self._forget_preparation(forward)

    def _forget_preparation(self, forward: Callable[..., Any]) -> None:
        """Let training wrap a model that was evaluated before, for several processes.

        `forward` is the model's own, without the precision that Accelerate put around it.

        Relies on: `Trainer.evaluate` has Accelerate prepare a model that was not trained yet,
        without the wrapper that averages gradients, and Accelerate leaves a model that it has
        prepared once as it is. Each process would train by itself.
        """
        model, prepared = self.model, self.accelerator._models
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled  # wrapped in evaluation, too
        if self.accelerator.num_processes > 1 and not is_sharded and model in prepared:
            model.forward = forward
            model.__dict__.pop("_original_forward", None)
            model._is_accelerate_prepared = False
            prepared.remove(model)

    def _set_signature_columns_if_needed(self) -> None:
        """Keep task and environment. Relies on: TRL's own are the columns that a row may have."""
        self._signature_columns = ["task", "env"]

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Add up the gradient of TRL's micro-batch in smaller ones, so that memory stays flat.

        Relies on: the `Trainer`'s own method takes the gradient of what `_prepare_inputs` returns,
        once; TRL's does that too and counts micro-batches and their time.
        """
        model.train()
        batch = self._prepare_inputs(inputs)
        generate_every = self.args.steps_per_generation * self.num_iterations
        staleness = self._step % generate_every // self.args.gradient_accumulation_steps
        started = time.perf_counter()
        *others, last = self.scorer.micro_batches(batch, is_training=True)
        loss = torch.zeros((), device=self.accelerator.device)
        for micro_batch in others:
            with without_sync(self.accelerator, model, self._trained_beside):
                loss += Trainer.training_step(self, model, micro_batch, num_items_in_batch)
        loss += super().training_step(model, last, num_items_in_batch)
        self.training_log.add_work([*others, last], time.perf_counter() - started, staleness)
        self.training_log.write_means("train")
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Let a micro-batch of ours pass. Relies on: TRL plays, splits and buffers all else."""
        if isinstance(generation_batch, MicroBatch):
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
        step = (self.state.global_step, self._step % self.args.gradient_accumulation_steps)
        factors = {}
        if mode == "train":
            progress = self.state.global_step / max(1, self.state.max_steps)
            factors = reward_factors(self.args.schedules, progress, self.state.log_history)
        with self.clock.measure("rollout"):
            if mode == "train" and self.follower is not None:
                trajectories, followed, seconds = self.follower.play(inputs, step, factors)
            else:
                trajectories, followed = self.player.play(inputs, mode, step, factors), {}
                seconds = sum(t.timings["generate_seconds"] for t in trajectories)
        self.clock.note_generation(seconds)
        with self.clock.measure("score"):
            batch = self.builder.build(self.model, trajectories, factors)
            if mode == "train":
                self.last_batch = batch.record
                self.state.num_input_tokens_seen += sum(e.num_tokens for e in batch.episodes)
            if mode == "train" or self._last_evaluated_step != self.state.global_step:
                self.forget_trajectories(mode)
            self.trajectories[mode] += trajectories
            num_tokens_seen = self.state.num_input_tokens_seen
            self.training_log.add_batch(mode, step[0] + 1, batch, factors, num_tokens_seen)
            for name, value in followed.items():
                self._metrics[mode][name].append(value)
            if mode == "train" and self.player.branches is not None:
                replayed = self.player.branches.replayed_steps
                self._metrics[mode]["branches/replayed_steps"].append(replayed)
        return dict(batch.record.tensors)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a micro-batch in training, of a whole batch in evaluation.

        TRL's own knows a ratio per token or per row, and a mean over tokens or rows; ours also
        knows steps and trajectories. Where both know a setting they agree, and a test says so.
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
        self.training_log.write_means("train" if is_training else "eval")
        return loss

    # The loss

    def _micro_batch_loss(self, model: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        scores = self.scorer.score(model, micro_batch, with_routing=True)
        return self._policy_loss(micro_batch, scores)

    def _policy_loss(self, micro_batch: MicroBatch, scores: TokenScores) -> torch.Tensor:
        """Return the policy's loss, and that of a mixture's routers, of a micro-batch."""
        loss = self._reduce_loss(self.objective(micro_batch, scores), micro_batch["loss_weights"])
        if scores.routing is not None:
            weights = micro_batch["router_weights"]
            imbalance = scores.routing.imbalance(micro_batch["expert_load"][0, 0])
            imbalance = micro_batch.expand(imbalance)
            self.means.add_mean("aux_loss", imbalance, weights)
            loss = loss + self.router_aux_loss_coef * self._reduce_loss(imbalance, weights)
        return loss

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
