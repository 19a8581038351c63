"""Ranks with ties, and how episodes without a score count."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from agent_envs.scoring.statistics import ALPHA, TaskScores, holm, paired_differences, paired_test

MAX_UNSCORED: Final = 0.02
"""Largest share of episodes, and of tasks, that may lack a score. Beyond it all of them count 0."""
FAULT_RULE: Final = (
    "Infrastructure failures are shown next to the score. Failed episodes are left out if they are "
    f"at most {MAX_UNSCORED:.0%} of an agent's in an environment; otherwise all of them count as "
    "failures."
)
RANK_RULE: Final = (
    "Ranks: the agent with the highest score leads. The agents after it share its rank up to the "
    "first whose difference from it is significant; that agent leads the next group, and so on. "
    "A rank is one more than the number of agents in the groups before; = marks a shared rank. "
    "Significance: exact test on the tasks that both ran (McNemar's for one episode per task, sign "
    "flips otherwise), with Holm's correction over all agents compared with the leader, "
    f"{ALPHA:.0%} level."
)


def mean_by_task(scores: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Average the samples of each task, given pairs of task index and score."""
    samples: dict[int, list[float]] = {}
    for task, score in scores:
        samples.setdefault(task, []).append(score)
    return {task: math.fsum(samples[task]) / len(samples[task]) for task in sorted(samples)}


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
        p_values = [
            paired_test(paired_differences(filled[leader], filled[other])) for other in others
        ]
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
