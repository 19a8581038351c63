"""Evaluation of a policy: success rates, pass@k and majority votes."""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from agent_envs.scoring import pass_at_k
from agent_envs.scoring.answers import normalize_answer
from agent_envs.scoring.statistics import mean_interval, share_interval
from agent_trainers.policies import Policy, Usage
from agent_trainers.rollout.collector import Collector, Rollout
from agent_trainers.rollout.environments import MakeEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of a policy."""

    trajectories: list[Trajectory]
    """Every episode; those of the same task are adjacent."""
    metrics: dict[str, float]
    """Means over the scorable episodes, ``success`` among them."""
    pass_at_k: dict[int, float]
    """For each k, the chance that one of k samples of a task succeeds, over all tasks."""
    intervals: dict[str, tuple[float, float]]
    """95 % confidence interval of each metric and of ``pass@k``, over tasks; none of one task."""
    num_failed: int
    """Episodes that are not scorable."""
    usage: Usage
    """Model calls and tokens of all episodes."""

    @property
    def success_of_all(self) -> float:
        """Share of all episodes that succeeded; an unscorable one counts as a failure."""
        return sum(t.success for t in self.trajectories) / max(1, len(self.trajectories))


def plan_samples(tasks: Sequence[int], samples_per_task: int, seed: int) -> list[EpisodeSpec]:
    """Return the specs of `samples_per_task` episodes of each task, those of a task adjacent."""
    return [
        EpisodeSpec(
            task=task, seed=task, group_id=str(task), rng=np.random.default_rng([seed, task, k])
        )
        for task in tasks
        for k in range(samples_per_task)
    ]


def evaluate_policy(
    make_env: MakeEnv, policy: Policy, tasks: Sequence[int], **settings: Any
) -> Evaluation:
    """Evaluate `policy` in environments made by `make_env`, with the settings of `evaluate`."""
    return evaluate(Rollout(make_env, policy), tasks, **settings)


def evaluate(
    rollout: Collector,
    tasks: Sequence[int],
    *,
    samples_per_task: int = 1,
    ks: Sequence[int] = (1,),
    seed: int = 0,
) -> Evaluation:
    """Run every task `samples_per_task` times with draws by `seed`, and close `rollout`.

    `ks` are the k of pass@k, each at most `samples_per_task`; tasks with fewer scorable episodes
    are left out.
    """
    specs = plan_samples(tasks, samples_per_task, seed)
    with (
        contextlib.closing(rollout),
        tqdm(total=len(specs), desc="evaluating", unit="episode", disable=None) as bar,
    ):
        trajectories = rollout.collect(specs, lambda _: bar.update())
    scored = [trajectory for trajectory in trajectories if trajectory.is_scorable]
    records = [{"return": t.return_, **t.metrics} for t in scored]
    metrics = means(records)
    values = {n: [(t.group_id, r[n]) for t, r in zip(scored, records, strict=True) if n in r]
              for n in metrics}  # fmt: skip
    solved = {k: _pass_at_k(scored, k) for k in ks}
    intervals = {name: confidence_interval(pairs) for name, pairs in values.items()}
    for k, own in solved.items():
        if len(own) > 1:
            found = share_interval([*own.values()], len(scored) if k == 1 else None)
            intervals[f"pass@{k}"] = found.low, found.high
    return Evaluation(
        trajectories=trajectories,
        metrics=metrics,
        pass_at_k={
            k: float(np.mean([*own.values()])) if own else float("nan") for k, own in solved.items()
        },
        intervals={name: found for name, found in intervals.items() if found is not None},
        num_failed=len(trajectories) - len(scored),
        usage=sum((Usage(**trajectory.usage) for trajectory in trajectories), Usage()),
    )


def confidence_interval(values: Sequence[tuple[Hashable, float]]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean of pairs of task and value, None of a single task.

    Of shares of successes it is exact, else Student's t over the means of tasks.
    """
    by_task: dict[Hashable, list[float]] = {}
    for task, value in values:
        by_task.setdefault(task, []).append(value)
    if len(by_task) < 2:
        return None
    shares = [float(np.mean(own)) for own in by_task.values()]
    is_share = {value for _, value in values} <= {0.0, 1.0}
    found = share_interval(shares, len(values)) if is_share else mean_interval(shares)
    return found.low, found.high


def means(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the records that have it."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: float(np.mean([r[name] for r in records if name in r])) for name in names}


def _pass_at_k(trajectories: Sequence[Trajectory], k: int) -> dict[str, float]:
    outcomes: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        outcomes.setdefault(trajectory.group_id, []).append(trajectory.success)
    return {task: pass_at_k(len(o), sum(o), k) for task, o in outcomes.items() if len(o) >= k}


def choose_by_majority(attempts: Sequence[Trajectory]) -> int:
    """Return the index of the first attempt with the most frequent answers.

    An attempt that ended in an error is returned before all others: the vote is incomplete then.
    """
    for k, attempt in enumerate(attempts):
        if attempt.error is not None:
            return k
    return majority([answers_of(step.info for step in attempt.transitions) for attempt in attempts])


def majority(answers: Sequence[tuple[str, ...]]) -> int:
    """Return the index of the first attempt with the most frequent answers, not counting none."""
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0
    # most_common keeps the order of the first vote where counts are equal
    (winner, _), *_ = votes.most_common(1)
    return answers.index(winner)


def answers_of(infos: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the answers of an attempt, normalised, from the `info` of its steps."""
    actions = (info.get("action", {}) for info in infos)
    return tuple(normalize_answer(a["answer"]) for a in actions if a.get("kind") == "answer")
