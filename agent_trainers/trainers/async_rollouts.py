"""Asynchronous rollouts: episodes of the next optimiser steps run while the model is trained.

Batches are drawn, and trained, in the order of a synchronous run, each at most ``max_staleness``
updates early. Rollouts wait for the optimiser instead of discarding episodes, and every episode
that started is trained, so what is trained has the lengths of what is drawn.

A checkpoint holds no episodes: a resumed run restarts those of batches that were not trained, from
their seeds. Restarting only unfinished episodes would replace the long ones.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from agent_envs.core.async_bridge import submit
from agent_envs.errors import ConfigurationError
from agent_trainers.rollout.collector import Collector
from agent_trainers.tasks.samplers import DrawnTask, TaskSampler
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trainers.rollouts import CollectedBatch, Plan, TrainerRollouts
from agent_trainers.trajectory import Trajectory

Step = tuple[int, int]


class AsyncRollouts(TrainerRollouts):
    """Collects training batches in other threads, ahead of the optimiser."""

    def __init__(
        self,
        trainer: Any,
        collectors: dict[str, Collector],
        sampler: TaskSampler | None = None,
        env_names: Sequence[str] = (),
    ) -> None:
        """See `TrainerRollouts`; the collector of training has the policy that runs ahead."""
        super().__init__(trainer, collectors, sampler, env_names)
        self._trainer = trainer
        collectors["train"].share_loop()
        self._started: dict[Step, tuple[Plan, Future[list[Trajectory]]]] = {}
        self._restored: dict[Step, list[DrawnTask]] = {}
        self._upcoming: list[Any] = []  # rows of the micro-batches of this and the next steps
        self._num_taken, self._is_new = 0, False

    def take(self, rows: Iterator[Any], count: int) -> Iterator[Any]:
        """Return the rows of the next optimiser step, keeping those of the steps after it."""
        del self._upcoming[: self._num_taken]
        num_ahead = self._args.num_steps_ahead * self._args.gradient_accumulation_steps
        self._upcoming += itertools.islice(rows, count + num_ahead - len(self._upcoming))
        self._num_taken, self._is_new = min(count, len(self._upcoming)), True
        return iter(self._upcoming[:count])

    def start(self, reward_factors: Mapping[str, float]) -> None:
        """Start the batches of this optimiser step and the next ones, once; collective."""
        if not self._is_new:
            return
        self._is_new = False
        trainer, args, state = self._trainer, self._args, self._trainer.state
        trainer.generator.publish()
        window, every = args.gradient_accumulation_steps, args.generate_every
        for i, rows in enumerate(self._upcoming):
            number = trainer._step + i
            step = (state.global_step + i // window, number % window)
            is_lost = i == 0 and trainer._buffered_inputs is None
            if step in self._started or (number % every and not is_lost):
                continue
            if step[0] < state.max_steps:
                self._start(rows, step, reward_factors)

    def _start(self, rows: Any, step: Step, reward_factors: Mapping[str, float]) -> None:
        for extension in self._extensions if self._processes.size > 1 else ():
            if type(extension).collect is not Extension.collect:
                raise ConfigurationError(
                    f"{type(extension).__name__} collects episodes of all processes together, "
                    "which rollout='async' cannot. Use one process, or rollout='sync'."
                )
        plan = self.plan(rows, "train", step, self._restored.pop(step, ()))
        run = functools.partial(self._run, plan.specs, "train", step, reward_factors)
        self._started[step] = plan, submit(run)

    def collect(
        self,
        inputs: Sequence[Mapping[str, Any]],
        mode: str,
        step: Step,
        reward_factors: Mapping[str, float] | None = None,
    ) -> CollectedBatch:
        """Wait for the episodes of a training batch; collect those of an evaluation; collective."""
        if mode != "train":
            return super().collect(inputs, mode, step, reward_factors)
        self._seconds = 0.0  # other threads generate
        plan, trajectories = self._started.pop(step)
        return self._finish(plan, trajectories.result(), mode, step, reward_factors or {})

    def state_dict(self) -> dict[str, Any]:
        """Return the tasks that were drawn for batches which are not trained yet."""
        drawn = self._restored | {step: plan.drawn for step, (plan, _) in self._started.items()}
        return {"drawn": [[*step, [[*task] for task in tasks]] for step, tasks in drawn.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._restored = {
            (step, part): [DrawnTask(*task) for task in tasks]
            for step, part, tasks in state["drawn"]
            if tasks
        }

    def close(self) -> None:
        """Abandon all batches that are not trained, and close the idle environments."""
        super().close()
        self._started.clear()
        self._upcoming, self._num_taken = [], 0
