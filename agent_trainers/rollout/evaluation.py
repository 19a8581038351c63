"""Measure a policy: play tasks, count successes."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from agent_envs.scoring import pass_at_k
from agent_trainers.policies import Policy, Usage
from agent_trainers.rollout.collector import Collector, EpisodeSpec, Rollout, TextEnv
from agent_trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How a policy did."""

    trajectories: list[Trajectory]
    """Every episode, with what it asked of the model; those of the same task stand together."""
    metrics: dict[str, float]
    """Means over the episodes that could be scored; ``success`` among them."""
    pass_at_k: dict[int, float]
    """For each k, the chance that one of k samples of a task succeeds, over all tasks."""
    num_failed: int
    """Episodes that could not be scored."""
    usage: Usage
    """What all episodes together asked of the model."""

    @property
    def success_of_all(self) -> float:
        """The share of all episodes that succeeded; one that could not be scored did not."""
        return sum(t.success for t in self.trajectories) / max(1, len(self.trajectories))


def plan_samples(tasks: Sequence[int], samples_per_task: int, seed: int) -> list[EpisodeSpec]:
    """Say what to play: so many episodes of each task, those of a task next to each other."""
    return [
        EpisodeSpec(
            task=task, seed=task, group_id=str(task), rng=np.random.default_rng([seed, task, k])
        )
        for task in tasks
        for k in range(samples_per_task)
    ]


def evaluate_policy(
    make_env: Callable[[], TextEnv],
    policy: Policy,
    tasks: Sequence[int],
    *,
    samples_per_task: int = 1,
    ks: Sequence[int] = (1,),
    seed: int = 0,
) -> Evaluation:
    """Play every task `samples_per_task` times in environments; see `evaluate`."""
    rollout = Rollout(make_env, policy)
    return evaluate(rollout, tasks, samples_per_task=samples_per_task, ks=ks, seed=seed)


def evaluate(
    rollout: Collector,
    tasks: Sequence[int],
    *,
    samples_per_task: int = 1,
    ks: Sequence[int] = (1,),
    seed: int = 0,
) -> Evaluation:
    """Play every task `samples_per_task` times; `seed` is that of every draw. Closes `rollout`.

    `ks` are the k of pass@k, each at most `samples_per_task`; tasks with fewer episodes that could
    be scored are left out.
    """
    specs = plan_samples(tasks, samples_per_task, seed)
    solved = played = 0
    with (
        contextlib.closing(rollout),
        tqdm(total=len(specs), desc="evaluating", unit="episode") as bar,
    ):

        def show(trajectory: Trajectory) -> None:
            nonlocal solved, played
            solved += trajectory.success
            played += 1  # a bar that is off counts nothing
            bar.update()
            bar.set_postfix(success=f"{solved / played:.2f}")

        trajectories = rollout.collect(specs, show)
    scored = [trajectory for trajectory in trajectories if trajectory.is_scorable]
    return Evaluation(
        trajectories=trajectories,
        metrics=means([{"return": t.return_, **t.metrics} for t in scored]),
        pass_at_k={k: _pass_at_k(scored, k) for k in ks},
        num_failed=len(trajectories) - len(scored),
        usage=sum((Usage(**trajectory.usage) for trajectory in trajectories), Usage()),
    )


def means(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number, over the records that have it."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: float(np.mean([r[name] for r in records if name in r])) for name in names}


def _pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    outcomes: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        outcomes.setdefault(trajectory.group_id, []).append(trajectory.success)
    values = [pass_at_k(len(o), sum(o), k) for o in outcomes.values() if len(o) >= k]
    return float(np.mean(values)) if values else float("nan")
