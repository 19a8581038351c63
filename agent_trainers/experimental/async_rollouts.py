"""Rollout worker for TRL's asynchronous trainer.

``trl.experimental.async_grpo.AsyncGRPOTrainer`` trains on the queue of its rollout worker and
sends its weights to a vLLM server. `EnvironmentRolloutWorker` fills that queue with one row per
environment step, each with its own advantage; groups of episodes run in threads, without a barrier.
"""

import contextlib
import functools
import itertools
import queue
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.algorithms.episodes import Array
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import MakeEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

GROUP_ESTIMATORS: Final = ("grpo", "grpo_step", "dr_grpo", "rloo", "gigpo")
"""Estimators that need one group only; there is no batch."""
_MAX_QUEUED_STEPS: Final = 1024
_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 30.0


class EnvironmentRolloutWorker:
    """Implements TRL's ``RolloutWorkerProtocol`` with environments in threads."""

    def __init__(
        self,
        make_env: MakeEnv,
        policy: Policy,
        tasks: Sequence[int],
        *,
        num_generations: int = 8,
        num_groups_at_once: int = 4,
        advantage_estimator: str = "grpo_step",
        seed: int = 0,
    ) -> None:
        """Create the worker of `tasks`, repeated in this order; `start` starts its threads.

        `policy` is a `VLLMServerPolicy` on the server that receives the trainer's weights, and
        `advantage_estimator` one of `GROUP_ESTIMATORS`.
        """
        lookup(dict.fromkeys(GROUP_ESTIMATORS), advantage_estimator, kind="group estimator")
        if num_generations < 2 or not tasks:
            raise ConfigurationError(
                f"num_generations={num_generations} must be at least 2, and tasks (got "
                f"{len(tasks)}) must not be empty: advantages compare episodes of one task."
            )
        self._make_rollout = functools.partial(Rollout, make_env, policy)
        self._tasks, self._num_generations, self._seed = list(tasks), num_generations, seed
        self._estimator = advantage_estimator
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(_MAX_QUEUED_STEPS)
        """Rows for the trainer."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """Empty, because the metrics are those of the rows."""
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(num_groups_at_once)
        ]
        self._groups = itertools.count()
        self._model_version = 0
        self._stopping = threading.Event()
        self._error: str | None = None

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after the current groups, waiting a limited time for each thread."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """Record the version of the server's weights."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if a thread failed; the rollout limits the time of a step."""
        if self._error is not None:
            raise RuntimeError(f"A rollout thread failed:\n{self._error}")

    def _run(self) -> None:
        try:
            with contextlib.closing(self._make_rollout()) as rollout:
                while not self._stopping.is_set():
                    self._run_group(rollout, next(self._groups))
        except Exception:  # noqa: BLE001 - the trainer calls check_health
            self._error = traceback.format_exc()

    def _run_group(self, rollout: Rollout, group: int) -> None:
        version, task = self._model_version, self._tasks[group % len(self._tasks)]
        seed = int(np.random.SeedSequence([self._seed, group]).generate_state(1)[0])
        rngs = [np.random.default_rng([self._seed, group, i]) for i in range(self._num_generations)]
        trajectories = rollout.collect(
            [EpisodeSpec(task=task, seed=seed, group_id=str(group), rng=rng) for rng in rngs]
        )
        if all(t.stop_reason is StopReason.POLICY_ERROR for t in trajectories):
            raise RuntimeError(trajectories[0].error)
        for trajectory, values in zip(
            trajectories, estimate(self._estimator, trajectories), strict=True
        ):
            for sample in step_samples(trajectory, values, group=group, model_version=version):
                self._put(sample)

    def _put(self, sample: "RolloutSample") -> None:
        """Queue a row, waiting while the queue is full."""
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                return self.rollout_buffer.put(sample, timeout=_POLL_SECONDS)
        return None


def step_samples(
    trajectory: Trajectory, advantages: Array, *, group: int, model_version: int
) -> "list[RolloutSample]":
    """Return one sample per step of an episode, with its advantage; none if it is not scorable.

    Steps sampled after an update of `model_version`, the version of the weights at the start of the
    group, are corrected by their recorded log-probabilities.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    if not trajectory.is_scorable:
        return []
    metrics = {"reward": trajectory.return_, "success": float(trajectory.success)}
    samples: list[RolloutSample] = []
    for transition, advantage in zip(trajectory.transitions, advantages, strict=True):
        no_loss = [0.0] * len(transition.prompt_ids)
        trained = [1.0] * len(transition.completion_ids)
        samples.append(
            RolloutSample(
                prompt=list(transition.messages),
                completion=[{"role": "assistant", "content": transition.action}],
                input_ids=np.array([*transition.prompt_ids, *transition.completion_ids], np.int64),
                completion_mask=np.array([*no_loss, *trained], np.int64),
                old_log_probs=np.array([*no_loss, *transition.logprobs], np.float32),
                advantage=float(advantage),
                model_version=model_version,
                group_id=group,
                metrics={} if samples else metrics,  # once per episode, because TRL averages them
            )
        )
    return samples
