"""Training log: metrics of batches and steps in TRL's ``log``, and checks that end a run."""

from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.distributed import ProcessGroup
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.monitoring.env_statistics import EvaluatedEnvironments, env_metrics
from agent_trainers.monitoring.episode_statistics import trainer_metrics
from agent_trainers.monitoring.faults import EPISODE_FAULTS, FaultWatch, count_faults
from agent_trainers.monitoring.metrics_log import RunningMeans
from agent_trainers.trainers.batch_builder import BuiltBatch
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trainers.scorer import DRIFT
from agent_trainers.trajectory import Trajectory


@dataclass(kw_only=True)
class TrainingLog:
    """Collects the metrics of batches and of the steps taken on them."""

    means: RunningMeans
    """Means of the loss and the scorer."""
    processes: ProcessGroup
    metrics: Mapping[str, MutableMapping[str, list[float]]]
    """TRL's lists of values, by mode and name."""
    texts: Mapping[str, Any] | None
    """TRL's queues of completions; None if they are not logged."""
    outcome_terms: frozenset[str]
    """Reward terms that are outcomes."""
    faults: FaultWatch
    extensions: Sequence[Extension]
    env_names: Sequence[str]
    """Environments of training, where there are several."""
    evaluated: EvaluatedEnvironments | None
    """Environments of evaluation, where there are several."""
    max_drift: float | None
    """Largest accepted mean difference of log-probabilities, in nats per token."""

    def add_batch(
        self,
        mode: str,
        step: int,
        batch: BuiltBatch,
        factors: Mapping[str, float],
        num_tokens_seen: float,
    ) -> None:
        """Log the statistics of a batch and the factors of its reward terms; collective.

        `step` is the optimiser step of the batch.

        Raises:
            RolloutError: If most episodes fail.
        """
        trajectories, advantages = batch.record.trajectories, batch.credit.advantages
        if mode == "eval" and self.evaluated is not None:
            self._add_evaluated(self.evaluated, batch)
            metrics = {}
        else:
            metrics = trainer_metrics(batch.episodes, advantages, self.outcome_terms)
        if mode == "train":
            metrics |= env_metrics(batch.episodes, advantages, self.env_names)
        metrics |= {f"reward_factor/{name}": factor for name, factor in factors.items()}
        for extension in self.extensions:
            metrics |= extension.metrics(mode, step, batch)
        faults = self.processes.all_gather_objects([count_faults(trajectories)])
        metrics |= {f"faults/{name}": sum(counts[name] for counts in faults) for name in faults[0]}
        for name, value in {**metrics, **batch.credit.metrics}.items():
            self.metrics[mode][name].append(value)
        self.metrics[mode]["num_tokens"] = [num_tokens_seen]
        if self.texts is not None:
            self._add_texts(self.texts, batch)
        failed = [
            (EPISODE_FAULTS[t.stop_reason], t.error)
            for t in trajectories
            if t.stop_reason in EPISODE_FAULTS
        ]
        num_episodes = len(batch.episodes)
        self.faults.check(mode, num_episodes, self.processes.all_gather_objects(failed))

    def add_work(self, micro_batches: Sequence[MicroBatch], seconds: float, staleness: int) -> None:
        """Record padding, throughput and `staleness`, optimiser steps since sampling."""
        rows = [micro_batch.forwarded for micro_batch in micro_batches]
        forwarded = sum(r["prompt_ids"].numel() + r["completion_ids"].numel() for r in rows)
        real = sum(int(r["prompt_mask"].sum() + r["completion_mask"].sum()) for r in rows)
        trained = sum(int(micro_batch["tool_mask"].sum()) for micro_batch in micro_batches)
        self.means.add("rows/padding_share", forwarded - real, forwarded)
        self.means.add("rows/forwarded_per_trained_token", forwarded, trained)
        self.means.add("rows/tokens_per_second", real * self.processes.size, seconds)
        self.means.add("sampling/staleness", staleness)

    def write_means(self, mode: str) -> None:
        """Log the means since the last call; collective.

        Raises:
            ConfigurationError: If log-probabilities drift too far.
        """
        means = self.means.gather()
        for name, value in means.items():
            self.metrics[mode][name].append(value)
        if self.max_drift is None or (drift := means.get(DRIFT, 0.0)) <= self.max_drift:
            return
        raise ConfigurationError(
            f"The trainer's log-probabilities of the sampled tokens differ by {drift:.3g} nats per "
            f"token from those at sampling (max_logprob_drift: {self.max_drift:g}). Policy and "
            "trainer do not see the same tokens or weights: compare the chat template, the "
            "tokenizer and the precision of both, and whether the server has the newest weights. "
            "To train nonetheless, raise max_logprob_drift."
        )

    def _add_evaluated(self, evaluated: EvaluatedEnvironments, batch: BuiltBatch) -> None:
        """Log the statistics of the whole evaluation so far, not a mean over batches."""
        own = self.metrics["eval"]
        if not own:  # TRL has logged the last evaluation
            evaluated.clear()
        metrics = evaluated.add(batch.episodes, batch.credit.advantages, self.outcome_terms)
        own.update({name: [value] for name, value in metrics.items()})

    def _add_texts(self, texts: Mapping[str, Any], batch: BuiltBatch) -> None:
        own = [_as_conversation(t) for t in batch.record.trajectories]
        pairs = self.processes.all_gather_objects(own)
        texts["prompt"].extend(prompt for prompt, _ in pairs)
        texts["completion"].extend(completion for _, completion in pairs)
        texts["advantages"].extend(
            float(np.mean(a)) if len(a) else 0.0 for a in batch.credit.advantages
        )
        rewards: Mapping[str, MutableSequence[float]] = texts["rewards"]
        for name in sorted({name for episode in batch.episodes for name in episode.reward_terms}):
            rewards[name].extend(e.reward_terms.get(name, 0.0) for e in batch.episodes)


def _as_conversation(trajectory: Trajectory) -> tuple[list[Any], list[Any]]:
    """Return prompt and completion messages for TRL's completion log."""
    if not trajectory.transitions:
        return [], []
    first, last = trajectory.transitions[0], trajectory.transitions[-1]
    later = last.messages[len(first.messages) :]
    return list(first.messages), [*later, {"role": "assistant", "content": last.action}]
