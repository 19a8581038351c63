"""One batch: played, measured, with the values of a critic and the branches estimators may see."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agent_trainers.rollout.collector import EpisodeSpec, Rollout
from benchmarks.credit.critic import FittedCritic
from benchmarks.credit.measure import Measurement
from benchmarks.credit.policies import Environment, batch_maker, draw_tasks, load_stage
from benchmarks.credit.true_advantages import CreditBatch

if TYPE_CHECKING:
    from benchmarks.credit.__main__ import Cell, CreditArguments


def measure_batch(
    cell: "Cell",
    environment: Environment,
    start: Path,
    work: Path,
    options: "CreditArguments",
) -> CreditBatch:
    """Play a batch of a stage's policy and measure its advantages.

    As many episodes of other tasks are played before, which the critic is fitted to.
    """
    runs = work / cell.path.parts[0] / "runs"
    model, policy = load_stage(start, runs, cell.name, cell.seed)
    tasks = draw_tasks(environment, 2 * options.num_tasks, cell.seed)
    shown, measured = tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]
    rollout = Rollout(batch_maker(environment), policy, keeps_states=True)
    try:
        played = rollout.collect(_specs(shown, options.group_size, cell.seed, 0))
        critic = FittedCritic(model, 0, [t for t in played if t.is_scorable])
        batch = Measurement(rollout, _specs(measured, options.group_size, cell.seed, 1), cell.seed)
        branches = batch.play_seen_branches(options.branch_steps)
        batch.go_on(options.reliability, options.max_branches)
        return batch.batch(
            environment=cell.environment,
            stage=cell.name,
            seed=cell.seed,
            values=critic.values(batch.trajectories),
            branches=branches,
        )
    finally:
        rollout.close()


def _specs(tasks: list[int], group_size: int, seed: int, number: int) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            task=task,
            seed=task,
            group_id=str(task),
            rng=np.random.default_rng([seed, number, task, member]),
        )
        for task in tasks
        for member in range(group_size)
    ]
