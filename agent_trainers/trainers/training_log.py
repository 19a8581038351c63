"""Training log: metrics of batches and steps in TRL's ``log``, and checks that end a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.monitoring.env_statistics import env_metrics
from agent_trainers.monitoring.episode_statistics import trainer_metrics
from agent_trainers.monitoring.faults import FaultWatch, count_faults
from agent_trainers.trainers.batch_builder import BuiltBatch
from agent_trainers.trainers.scorer import DRIFT


class TrainingLog:
    """Collects the metrics of batches and of the steps taken on them."""

    def __init__(self, trainer: Any) -> None:
        """Write into the log of a `StepGRPOTrainer`."""
        self._trainer, self._processes = trainer, trainer.processes
        self._means, self._metrics = trainer.means, trainer._metrics
        self._faults = FaultWatch(trainer.args.max_fault_share)

    def add_batch(
        self, mode: str, step: int, batch: BuiltBatch, factors: Mapping[str, float]
    ) -> None:
        """Log the statistics of a batch and the factors of its reward terms; collective.

        `step` is the optimiser step of the batch.
        """
        own, episodes, trainer = self._metrics[mode], batch.episodes, self._trainer
        if mode == "eval" and trainer.evaluated is not None:
            # of the whole evaluation so far, not a mean over batches
            so_far = trainer.evaluated.add(episodes, trainer.source.outcome_terms)
            own.update({name: [value] for name, value in so_far.items()})
            metrics = {}
        else:
            metrics = trainer_metrics(episodes, trainer.source.outcome_terms)
        if mode == "train":
            metrics |= env_metrics(episodes, trainer.source.names)
        metrics |= {f"reward_factor/{name}": factor for name, factor in factors.items()}
        for extension in trainer.extensions:
            metrics |= extension.metrics(mode, step, batch)
        for name, value in (metrics | count_faults(episodes)).items():
            own[name].append(value)
        own["num_tokens"] = [trainer.state.num_input_tokens_seen]
        self._faults.check(mode, episodes)

    def add_work(self, micro_batches: Sequence[MicroBatch], seconds: float, staleness: int) -> None:
        """Record padding, throughput and `staleness`, optimiser steps since sampling."""
        rows = [micro_batch.forwarded for micro_batch in micro_batches]
        forwarded = sum(r["prompt_ids"].numel() + r["completion_ids"].numel() for r in rows)
        real = sum(int(r["prompt_mask"].sum() + r["completion_mask"].sum()) for r in rows)
        trained = sum(int(micro_batch["tool_mask"].sum()) for micro_batch in micro_batches)
        self._means.add("rows/padding_share", forwarded - real, forwarded)
        self._means.add("rows/forwarded_per_trained_token", forwarded, trained)
        self._means.add("rows/tokens_per_second", real * self._processes.size, seconds)
        self._means.add("sampling/staleness", staleness)

    def write_means(self, mode: str) -> None:
        """Log the means since the last call; collective."""
        means = self._means.gather()
        for name, value in means.items():
            self._metrics[mode][name].append(value)
        limit, drift = self._trainer.generator.max_drift, means.get(DRIFT, 0.0)
        if limit is not None and drift > limit:
            raise ConfigurationError(
                f"The trainer's log-probabilities of the sampled tokens differ by {drift:.3g} nats "
                f"per token from those at sampling (max_logprob_drift: {limit:g}), so it does not "
                "see the same tokens or weights. Compare chat template, tokenizer and precision of "
                "both, and the weights of the server; or raise max_logprob_drift."
            )
