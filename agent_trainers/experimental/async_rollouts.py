"""Rollout worker for TRL's asynchronous trainer.

``trl.experimental.async_grpo.AsyncGRPOTrainer`` trains on the queue of its rollout worker and
sends its weights to a vLLM server. `EnvironmentRolloutWorker` fills that queue with one row per
environment step, each with its own advantage, from a thread that collects group after group.
"""

import contextlib
import itertools
import queue
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agent_trainers.algorithms.advantages import estimate
from agent_trainers.algorithms.episodes import Array
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import MakeEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

_MAX_QUEUED_STEPS: Final = 1024
_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 30.0


class EnvironmentRolloutWorker:
    """Implements TRL's ``RolloutWorkerProtocol`` with environments in a thread."""

    def __init__(
        self,
        make_env: MakeEnv,
        policy: Policy,
        tasks: Sequence[int],
        *,
        num_generations: int = 8,
        num_groups_at_once: int = 4,
        advantage_estimator: str = "grpo_step",
    ) -> None:
        """Create the worker of `tasks`, repeated in this order; `start` starts its thread.

        `policy` is a `VLLMServerPolicy` on the server that receives the trainer's weights, and
        `advantage_estimator` one without a critic, for the groups that are collected at once.
        """
        self._make_env, self._policy, self._tasks = make_env, policy, list(tasks)
        self._num_generations, self._num_groups = num_generations, num_groups_at_once
        self._estimator = advantage_estimator
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(_MAX_QUEUED_STEPS)
        """Rows for the trainer."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """Empty, because the metrics are those of the rows."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start = self._thread.start
        self._model_version = 0
        self._stopping = threading.Event()
        self._error: str | None = None

    def stop(self) -> None:
        """Stop after the current groups, waiting a limited time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """Record the version of the server's weights."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if the thread failed; the rollout limits the time of a step."""
        if self._error is not None:
            raise RuntimeError(f"The rollout thread failed:\n{self._error}")

    def _run(self) -> None:
        try:
            with contextlib.closing(Rollout(self._make_env, self._policy)) as rollout:
                for first in itertools.count(step=self._num_groups):
                    for sample in self._collect(rollout, range(first, first + self._num_groups)):
                        self._put(sample)
                    if self._stopping.is_set():
                        return
        except Exception:  # noqa: BLE001 - the trainer calls check_health
            self._error = traceback.format_exc()

    def _collect(self, rollout: Rollout, groups: Sequence[int]) -> "list[RolloutSample]":
        version = self._model_version
        specs = [
            EpisodeSpec(
                task=self._tasks[group % len(self._tasks)],
                seed=group,
                group_id=str(group),
                rng=np.random.default_rng([group, member]),
            )
            for group in groups
            for member in range(self._num_generations)
        ]
        trajectories = rollout.collect(specs)
        if all(t.stop_reason is StopReason.POLICY_ERROR for t in trajectories):
            raise RuntimeError(trajectories[0].error)
        advantages = zip(trajectories, estimate(self._estimator, trajectories), strict=True)
        return [s for t, values in advantages for s in step_samples(t, values, version)]

    def _put(self, sample: "RolloutSample") -> None:
        """Queue a row, waiting while the queue is full."""
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                return self.rollout_buffer.put(sample, timeout=_POLL_SECONDS)
        return None


def step_samples(
    trajectory: Trajectory, advantages: Array, model_version: int
) -> "list[RolloutSample]":
    """Return one sample per step of an episode, with its advantage; none if it is not scorable.

    Steps sampled after an update of `model_version`, the version of the weights at the start of the
    episode, are corrected by their recorded log-probabilities.
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
                group_id=int(trajectory.group_id),
                metrics={} if samples else metrics,  # once per episode, because TRL averages them
            )
        )
    return samples
