"""How sure a score is: intervals, paired comparisons, and ranks with ties.

The unit is the task. Samples of one task are averaged first, because they are not independent: a
task that is easy is easy every time. All functions are pure, and give the same for the same scores.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from agent_envs.errors import ConfigurationError
from agent_leaderboard.report.special import beta_quantile, t_quantile

CONFIDENCE: Final = 0.95
ALPHA: Final = 1 - CONFIDENCE
MAX_UNSCORED: Final = 0.02
"""Share of episodes, and of tasks, that may be without a score. Beyond it all of them count 0."""
MOST_EXACT: Final = 16
"""Up to so many differences the test tries all signs: 65,536."""
NUM_FLIPS: Final = 10_000
"""Signs that it draws for more."""
FAULT_RULE: Final = (
    "Faults of the infrastructure stand beside the score. Episodes that it ended are left out "
    f"if they are at most {MAX_UNSCORED:.0%} of an agent's in an environment; else all of them "
    "count as failures."
)

TaskScores = Mapping[int, float]
"""The mean score of each task, by the task's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, and where the true one is likely to be."""

    mean: float
    """Mean over tasks."""
    low: float
    """Lower end of the interval of `CONFIDENCE`."""
    high: float
    """Upper end."""
    num_tasks: int
    """How many tasks it rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two agents on the tasks that both played."""

    difference: Interval
    """First less second."""
    p_value: float
    """Two-sided p-value of `paired_test`."""
    num_better: int
    """Tasks where the first scores higher."""
    num_worse: int
    """Tasks where the second does."""
    num_equal: int
    """Tasks where neither does."""


def mean_by_task(scores: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Average the samples of each task: a task's index and a score, one pair an episode."""
    samples: dict[int, list[float]] = {}
    for task, score in scores:
        samples.setdefault(task, []).append(score)
    return {task: math.fsum(samples[task]) / len(samples[task]) for task in sorted(samples)}


# Intervals


def share_interval(shares: Sequence[float], num_episodes: int | None = None) -> Interval:
    """Estimate a share with an exact interval.

    With one episode a task, the interval of Clopper and Pearson (1934): it holds the true share in
    at least `CONFIDENCE` of all cases, whatever the share is. With several, that of Korn and
    Graubard (1998): as many independent episodes as would vary as much as the tasks do.

    Args:
        shares: How often each task was solved, from 0 to 1, shape (N,).
        num_episodes: Episodes of all tasks together; N if not given.

    Raises:
        ConfigurationError: If there is no task.
    """
    values = np.asarray(shares, float)
    if not (num_tasks := len(values)):
        raise ConfigurationError("An interval needs values of at least one task.")
    mean = math.fsum(values) / num_tasks
    size = _effective_size(values, mean, num_episodes or num_tasks)
    right = mean * size
    low = beta_quantile(ALPHA / 2, right, size - right + 1) if mean > 0 else 0.0
    high = beta_quantile(1 - ALPHA / 2, right + 1, size - right) if mean < 1 else 1.0
    return Interval(mean=mean, low=low, high=high, num_tasks=num_tasks)


def _effective_size(values: npt.NDArray[np.float64], mean: float, num_episodes: int) -> float:
    """Return how many independent episodes would vary as much; at least the number of tasks.

    Samples of a task that always agree are worth one; those that do not tell more.
    """
    num_tasks, variance = len(values), float(values.var())
    if mean in (0.0, 1.0) or num_tasks == num_episodes or num_tasks < 2:
        return num_tasks
    size = min(mean * (1 - mean) * num_tasks / max(variance, 1e-12), num_episodes)
    doubt = t_quantile(ALPHA, num_episodes - 1) / t_quantile(ALPHA, num_tasks - 1)
    return max(size * doubt**2, 1.0)


def mean_interval(values: Sequence[float]) -> Interval:
    """Estimate a mean of any numbers by Student's t; as wide as all numbers from a single one."""
    array = np.asarray(values, float)
    if not len(array):
        raise ConfigurationError("An interval needs at least one value.")
    mean = math.fsum(array) / len(array)
    reach = math.inf
    if len(array) > 1:
        deviation = float(array.std(ddof=1)) / math.sqrt(len(array))
        reach = t_quantile(ALPHA, len(array) - 1) * deviation
    return Interval(mean=mean, low=mean - reach, high=mean + reach, num_tasks=len(array))


def mean_over_environments(intervals: Sequence[Interval]) -> Interval:
    """Estimate the mean of the shares of several environments, each of equal weight.

    The environments are what they are, not a sample: tasks alone are in doubt. The distances of the
    single intervals' ends add up as independent errors do (Zou and Donner, 2008), so that what is
    unsure of an environment where all tasks were solved, or none, counts too.
    """
    if not intervals:
        raise ConfigurationError("A mean needs at least one environment.")
    mean = math.fsum(one.mean for one in intervals) / len(intervals)
    below = math.hypot(*(one.mean - one.low for one in intervals)) / len(intervals)
    above = math.hypot(*(one.high - one.mean for one in intervals)) / len(intervals)
    num_tasks = sum(one.num_tasks for one in intervals)
    return Interval(
        mean=mean, low=max(0.0, mean - below), high=min(1.0, mean + above), num_tasks=num_tasks
    )


def mean_elsewhere(intervals: Sequence[Interval]) -> Interval:
    """Estimate the mean share in other environments, of which these are a sample.

    Student's t over the environments' shares, whose spread holds that of their tasks; never
    narrower than `mean_over_environments`.
    """
    fixed = mean_over_environments(intervals)
    among = mean_interval([one.mean for one in intervals])
    return Interval(
        mean=fixed.mean,
        low=max(0.0, min(fixed.low, among.low)),
        high=min(1.0, max(fixed.high, among.high)),
        num_tasks=fixed.num_tasks,
    )


# Comparisons


def compare(first: TaskScores, second: TaskScores) -> Comparison | None:
    """Compare two agents on the tasks that both played; None if there are none."""
    array = np.asarray(_differences(first, second))
    if not len(array):
        return None
    return Comparison(
        difference=_difference_interval(array),
        p_value=paired_test(array.tolist()),
        num_better=int((array > 0).sum()),
        num_worse=int((array < 0).sum()),
        num_equal=int((array == 0).sum()),
    )


def _difference_interval(differences: npt.NDArray[np.float64]) -> Interval:
    """Estimate a mean difference after two more tasks: half a win, half a loss, and a tie.

    (Agresti and Min, 2005, for scores of 0 and 1.) Tasks that agree leave the doubt that none out
    of so many leaves about what has not been seen.
    """
    count = len(differences) + 2
    centre = math.fsum(differences) / count
    variance = (math.fsum(differences**2) + 1) / count - centre**2
    unseen = 1 - (ALPHA / 2) ** (1 / len(differences))
    reach = max(t_quantile(ALPHA, count - 1) * math.sqrt(variance / count), unseen)
    mean = math.fsum(differences) / len(differences)
    return Interval(
        mean=mean,
        low=max(-1.0, min(mean, centre - reach)),
        high=min(1.0, max(mean, centre + reach)),
        num_tasks=len(differences),
    )


def paired_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of no difference, from differences task by task or seed by seed.

    How often is their mean as far from 0 if each had the other sign with chance 1/2 (Fisher, 1935)?
    Exact for up to `MOST_EXACT` differences, and where each is 1, 0 or -1: that is the sign test,
    which is McNemar's.
    """
    array = np.asarray(differences, float)
    if set(np.abs(array[array != 0])) <= {1.0}:
        return sign_test(int((array > 0).sum()), int((array < 0).sum()))
    total = abs(float(array.sum())) - 1e-9  # sums in another order differ a little
    if len(array) <= MOST_EXACT:
        places = np.arange(len(array))
        signs = 1 - 2 * (np.arange(2 ** len(array))[:, None] >> places & 1)
        return float((np.abs(signs @ array) >= total).mean())
    rng = np.random.default_rng(0)
    size = max(1, 1_000_000 // len(array))
    reached = 1
    for start in range(0, NUM_FLIPS, size):
        signs = rng.choice((-1.0, 1.0), size=(min(size, NUM_FLIPS - start), len(array)))
        reached += int((np.abs(signs @ array) >= total).sum())
    return reached / (NUM_FLIPS + 1)


def p_value_text(value: float) -> str:
    """Write a p-value; small ones as a bound."""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the exact two-sided p-value of the sign test; ties are left out.

    With one pass or fail a task this is McNemar's exact test, on the two counts of tasks that only
    one of two agents solved (McNemar, 1947): the smaller is binomial with chance 1/2.
    """
    total, smaller = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(total, i) for i in range(smaller + 1))
    share: float = 2 * tail / 2**total  # of integers: sums of any size are exact
    return min(1.0, share)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for there being several of them (Holm, 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, floor = [0.0] * len(p_values), 0.0
    for position, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - position) * p_values[i]))
        adjusted[i] = floor
    return adjusted


# Ranks

RANK_RULE: Final = (
    "Ranks: the agent with the highest score leads, and the agents after it share its rank up to "
    "the first whose difference from it is significant; that one leads the next group, and so on. "
    "A rank is one more than the number of agents in the groups before; = marks one that is "
    "shared. Significant: exact test on the tasks that both played (McNemar's where a task is "
    "played once, of random signs else), with Holm's correction over all that are compared with "
    f"the leader, {ALPHA:.0%} level."
)


def ranks_with_ties(scores: Mapping[str, TaskScores]) -> dict[str, int]:
    """Rank agents from 1 by `RANK_RULE`: no better score has a worse rank.

    An agent that lacks more than `MAX_UNSCORED` of the tasks that others have scores 0 there.
    """
    tasks = frozenset[int]().union(*scores.values())
    filled = {agent: fill_unscored(own, tasks) for agent, own in scores.items()}
    means = {agent: math.fsum(own.values()) / len(own) for agent, own in filled.items()}
    waiting = sorted(scores, key=lambda agent: (-means[agent], agent))
    ranks: dict[str, int] = {}
    while waiting:
        leader, *others = waiting
        p_values = [paired_test(_differences(filled[leader], filled[other])) for other in others]
        group = [leader]
        for other, p_value in zip(others, holm(p_values), strict=True):
            if p_value < ALPHA and means[other] < means[group[-1]]:
                break
            group.append(other)
        ranks |= dict.fromkeys(group, len(ranks) + 1)
        waiting = waiting[len(group) :]
    return {agent: ranks[agent] for agent in scores}


def fill_unscored(scores: TaskScores, tasks: Iterable[int]) -> dict[int, float]:
    """Return the scores with 0 for tasks that lack one, if those are more than `MAX_UNSCORED`."""
    tasks = set(tasks)
    missing = tasks - scores.keys()
    if len(missing) <= MAX_UNSCORED * len(tasks):
        return dict(scores)
    return dict(sorted((dict.fromkeys(missing, 0.0) | dict(scores)).items()))


def _differences(first: TaskScores, second: TaskScores) -> list[float]:
    return [first[task] - second[task] for task in sorted(first.keys() & second.keys())]
