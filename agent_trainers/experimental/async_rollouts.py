"""Play our environments for TRL's asynchronous trainer: neither waits for the other.

``trl.experimental.async_grpo.AsyncGRPOTrainer`` trains on what its rollout worker has put into a
queue, and sends its weights to a vLLM server now and then. `EnvironmentRolloutWorker` is such a
worker: it plays whole groups of episodes against the server, one group per thread and so without a
barrier, and assigns credit per step. TRL's own worker knows one advantage per rollout; the queue
takes one per row, so here each step is a row, and the trainer's trie forwards what they share once.
"""

import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.algorithms.episodes import Array
from agent_trainers.batching.rows import make_rows
from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

GROUP_ESTIMATORS: Final = ("grpo", "grpo_step", "dr_grpo", "rloo", "gigpo")
"""Estimators that look at a group alone: there is no batch to look at."""
_POLL_SECONDS: Final = 0.2


class EnvironmentRolloutWorker:
    """Fills the queue of TRL's asynchronous trainer; fits its ``RolloutWorkerProtocol``.

    It lives in threads of the trainer's main process: environments whose Python works hard would
    slow the trainer down; those that wait for tools, servers or sandboxes do not.
    """

    def __init__(
        self,
        make_env: Callable[[], TextEnv],
        policy: Policy,
        tasks: Sequence[int],
        *,
        num_generations: int = 8,
        num_groups_at_once: int = 4,
        advantage_estimator: str = "grpo_step",
        estimator_settings: Mapping[str, Any] | None = None,
        step_timeout: float = 300.0,
        max_queued_steps: int = 1024,
        seed: int = 0,
    ) -> None:
        """Prepare to play.

        Args:
            make_env: Makes one environment.
            policy: Who acts: a `VLLMServerPolicy` on the server that gets the trainer's weights.
            tasks: Indices of tasks of the environment, played in this order, over and over.
            num_generations: Episodes of a group.
            num_groups_at_once: Groups under way at once.
            advantage_estimator: One of `GROUP_ESTIMATORS`.
            estimator_settings: Its options.
            step_timeout: As in `StepGRPOConfig`.
            max_queued_steps: Steps in the queue beyond which playing waits for the trainer.
            seed: Of the episodes and of what is sampled in them.

        Raises:
            UnknownNameError: If the estimator needs more than a group.
            ConfigurationError: If a group or the tasks are too few.
        """
        lookup(dict.fromkeys(GROUP_ESTIMATORS), advantage_estimator, kind="group estimator")
        if num_generations < 2 or not tasks:
            raise ConfigurationError(
                "num_generations must be at least 2 and there must be tasks: episodes of one task "
                "are compared with each other."
            )
        self._make_rollout = functools.partial(Rollout, make_env, policy, step_timeout=step_timeout)
        self._tasks, self._num_generations, self._seed = list(tasks), num_generations, seed
        self._estimator, self._estimator_settings = advantage_estimator, estimator_settings or {}
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(max_queued_steps)
        """Scored steps, for the trainer."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """What was measured, for the trainer's log."""
        self._threads = [
            threading.Thread(target=self._play, name=f"rollout-{i}", daemon=True)
            for i in range(num_groups_at_once)
        ]
        self._lock = threading.Lock()
        self._next_group = 0
        self._model_version = 0
        self._stopping = threading.Event()
        self._error: str | None = None
        self._last_sign_of_life = time.time()

    def start(self) -> None:
        """Begin to play."""
        self._last_sign_of_life = time.time()
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """Let groups under way end, for at most this long, and play no more."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def update_model_version(self, model_version: int) -> None:
        """Note which policy the server has now."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if playing failed, or if no episode ended for `stale_after_s` seconds.

        Raises:
            RuntimeError: With what went wrong.
        """
        if self._error is not None:
            raise RuntimeError(f"Playing episodes failed:\n{self._error}")
        silence = time.time() - self._last_sign_of_life
        if silence > stale_after_s:
            raise RuntimeError(f"No episode has ended for {silence:.0f} seconds.")

    def _play(self) -> None:
        rollout = self._make_rollout()
        try:
            while not self._stopping.is_set():
                self._play_group(rollout)
        except Exception:  # noqa: BLE001 - the policy is foreign; the trainer asks check_health
            if not self._stopping.is_set():
                self._error = traceback.format_exc()
        finally:
            rollout.close()

    def _play_group(self, rollout: Rollout) -> None:
        with self._lock:
            group, self._next_group = self._next_group, self._next_group + 1
        version, started = self._model_version, time.monotonic()
        trajectories = rollout.collect(self._specs(group), self._note_life)
        episodes = [summarise(trajectory) for trajectory in trajectories]
        num_scorable = sum(episode.is_scorable for episode in episodes)
        seconds = time.monotonic() - started
        self.metrics_queue.put(
            {
                "rollout/group_s": seconds,
                "episodes/unscorable": (len(episodes) - num_scorable, len(episodes)),
                "episodes/mean_turns": (sum(e.num_steps for e in episodes), len(episodes)),
            }
        )
        if all(t.stop_reason is StopReason.POLICY_ERROR for t in trajectories):
            raise RuntimeError(trajectories[0].error)
        if num_scorable < 2:  # nothing to compare with
            return
        advantages = estimate(self._estimator, episodes, **self._estimator_settings)
        rewards = [sum(episode.rewards) for episode in episodes if episode.is_scorable]
        for trajectory, values in zip(trajectories, advantages, strict=True):
            for sample in step_samples(trajectory, values, group=group, model_version=version):
                if "reward" in sample.metrics:
                    sample.metrics["reward_std"] = float(np.std(rewards))
                if not self._put(sample):
                    return

    def _specs(self, group: int) -> list[EpisodeSpec]:
        task = self._tasks[group % len(self._tasks)]
        seed = int(np.random.SeedSequence([self._seed, group]).generate_state(1)[0])
        return [
            EpisodeSpec(
                task=task,
                seed=seed,
                group_id=str(group),
                rng=np.random.default_rng([self._seed, group, member]),
            )
            for member in range(self._num_generations)
        ]

    def _note_life(self, _: Trajectory) -> None:
        self._last_sign_of_life = time.time()

    def _put(self, sample: "RolloutSample") -> bool:
        """Queue a step; wait where the queue is full. False if the worker was stopped."""
        while not self._stopping.is_set():
            sample.enqueued_at = time.time()
            try:
                self.rollout_buffer.put(sample, timeout=_POLL_SECONDS)
            except queue.Full:
                self._last_sign_of_life = time.time()  # it is the trainer's turn
            else:
                return True
        return False


def step_samples(
    trajectory: Trajectory, advantages: Array, *, group: int, model_version: int
) -> "list[RolloutSample]":
    """Turn an episode into one sample per step, each with its own advantage.

    Args:
        trajectory: What was played; none come of it if it could not be scored.
        advantages: One per step.
        group: Samples of the same group share a prompt.
        model_version: The policy that played. What was sampled after an update in between is
            corrected by its own log-probabilities.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    if not trajectory.is_scorable:
        return []
    episode = summarise(trajectory)
    metrics = {
        "reward": float(sum(episode.rewards)),
        **{f"rewards/{name}": value for name, value in episode.reward_terms.items()},
        "success": float(trajectory.success),
    }
    samples: list[RolloutSample] = []
    for row in make_rows(trajectory, merge=False):
        step = row.steps[0]
        transition = trajectory.transitions[step]
        silence = [0.0] * len(row.prompt_ids)
        samples.append(
            RolloutSample(
                prompt=list(transition.messages),
                completion=[{"role": "assistant", "content": transition.action}],
                input_ids=np.array([*row.prompt_ids, *row.completion_ids], np.int64),
                completion_mask=np.array([*silence, *row.is_trained], np.int64),
                old_log_probs=np.array([*silence, *row.logprobs], np.float32),
                advantage=float(advantages[step]),
                model_version=model_version,
                group_id=group,
                metrics={} if samples else metrics,  # once per episode: they are averaged
            )
        )
    return samples
