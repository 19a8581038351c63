"""Advantage estimators that measure state values by branches.

A branch is an episode with ``start > 0``: it shares its first ``start`` steps with the episode it
branched off. States of a group with the same anchor are pooled, as in `gigpo`.
"""

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from agent_trainers.algorithms.advantages import Estimator, find_estimator
from agent_trainers.algorithms.episodes import (
    Array,
    Episode,
    Floats,
    above,
    groups,
    is_rounding,
    returns_to_go,
)
from agent_trainers.algorithms.group_estimators import STD_EPSILON, Scale

Visit = tuple[int, int]


def vine(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Estimate ``r_t + gamma V(s_{t+1}) - V(s_t)`` per step, with values measured by branches.

    VinePPO (arXiv 2410.01679, section 4) over environment steps. ``V`` is the mean return from the
    state over branches, the episode and others of the group. A state with a single visit has no
    value: the return extends to the next state with one, and the step has the advantage of the step
    before. ``V(s_t)`` leaves out the episode itself; without branches and equal states this is
    `rloo`. Branches have advantage 0. `scale` divides by the root mean square of the advantages of
    the ``group`` or the ``batch`` plus 1e-4, or not at all (``none``).
    """
    return _value_differences(episodes, gamma, scale, branches_learn=False)


def tree(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Estimate the advantages of `vine` for branches, too.

    As in Tree-GRPO (arXiv 2509.21240) and ARPO (arXiv 2507.19849). The shared steps of a branch
    have advantage 0, because they count in the episode it branched off.
    """
    return _value_differences(episodes, gamma, scale, branches_learn=True)


vine.uses_branches = tree.uses_branches = True  # type: ignore[attr-defined]
tree.trains_branches = True  # type: ignore[attr-defined]
vine.extension = tree.extension = (  # type: ignore[attr-defined]
    "agent_trainers.experimental.branching:Branching"
)


def uses_branches(estimator: str | Estimator) -> bool:
    """Return whether an estimator has a true attribute ``uses_branches``."""
    return bool(getattr(find_estimator(estimator), "uses_branches", False))


def start_of(episode: Episode) -> int:
    """Return the first step that an episode does not share with another."""
    return int(getattr(episode, "start", 0))


def allocate_branches(
    episodes: Sequence[Episode],
    budget: float,
    *,
    gamma: float = 1.0,
    from_branches: bool = False,
) -> list[list[int]]:
    """Return the number of branches before each step that reduces the variance of values most.

    One more return from a state with ``n`` returns reduces the variance of its mean by
    ``var / (n (n + 1))`` per visit. Its expected cost is the mean number of remaining steps.
    Branches are assigned greedily by gain over cost. The variance of a state is
    shrunk towards that of the group's returns-to-go at the same step, so a group without spread
    gets no branches.

    `budget` is the expected number of environment steps, and `from_branches` whether branches may
    start in branches. Counts are of shape (S,), and 0 for the first state, which the group shares.
    """
    counts = [[0] * len(episode.rewards) for episode in episodes]
    heap: list[tuple[float, int, _Candidate]] = []
    for candidate in _candidates(episodes, gamma, from_branches=from_branches):
        heapq.heappush(heap, (-candidate.gain(0), len(heap), candidate))
    num_new = [0] * len(heap)
    while heap:
        gain, number, candidate = heapq.heappop(heap)
        if gain >= 0.0 or candidate.cost > budget:
            continue
        budget -= candidate.cost
        i, t = candidate.visits[num_new[number] % len(candidate.visits)]
        counts[i][t] += 1
        num_new[number] += 1
        heapq.heappush(heap, (-candidate.gain(num_new[number]), number, candidate))
    return counts


class _Candidate(NamedTuple):
    """A state from which branches may start."""

    visits: list[Visit]
    num_returns: int
    variance: float
    cost: float

    def gain(self, num_new: int) -> float:
        n = self.num_returns + num_new
        return len(self.visits) * self.variance / (n * (n + 1)) / self.cost


def _candidates(
    episodes: Sequence[Episode], gamma: float, *, from_branches: bool
) -> list[_Candidate]:
    returns = returns_to_go(episodes, gamma)
    found = []
    for members in groups(episodes).values():
        spreads = _spreads([returns[i] for i in members if start_of(episodes[i]) == 0])
        for visits in _visits(episodes, members).values():
            places = [
                (i, t)
                for i, t in visits
                if t > start_of(episodes[i]) and (from_branches or start_of(episodes[i]) == 0)
            ]
            if not places:
                continue
            values = np.array([returns[i][t] for i, t in visits])
            squares = float(((values - values.mean()) ** 2).sum())
            prior = float(np.mean([spreads[min(t, len(spreads) - 1)] for _, t in visits]))
            variance = (prior + squares) / len(values)
            left = float(np.mean([len(episodes[i].rewards) - t for i, t in visits]))
            is_constant = is_rounding(variance**0.5, 0.0, epsilon=1e-6)
            variance = 0.0 if is_constant else variance
            found.append(_Candidate(places, len(values), variance, left))
    return found


def _spreads(returns: Sequence[Floats]) -> list[float]:
    """Return the variance of returns-to-go at each step, of the step before if there is but one."""
    spreads = [0.0]
    for t in range(max(map(len, returns), default=0)):
        ahead = [values[t] for values in returns if len(values) > t]
        spreads.append(float(np.var(ahead, ddof=1)) if len(ahead) > 1 else spreads[-1])
    return spreads[1:] or spreads


def _value_differences(
    episodes: Sequence[Episode], gamma: float, scale: Scale, *, branches_learn: bool
) -> list[Array]:
    returns = returns_to_go(episodes, gamma)
    advantages = [np.zeros(len(values)) for values in returns]
    learners = []
    for members in groups(episodes).values():
        visits = _visits(episodes, members)
        values = {
            state: float(np.mean([returns[i][t] for i, t in same]))
            for state, same in visits.items()
            if len({i for i, _ in same}) > 1
        }
        backed_up = {i: _back_up(episodes[i], values, gamma) for i in members}
        own = [i for i in members if branches_learn or start_of(episodes[i]) == 0]
        for i in own:
            start = start_of(episodes[i])
            for t in range(start, len(returns[i])):
                visited = visits[episodes[i].anchors[t]]
                others = [backed_up[j][u] for j, u in visited if j != i]
                if others:
                    advantages[i][t] = above(backed_up[i][t], float(np.mean(others)))
                elif t > start:
                    advantages[i][t] = advantages[i][t - 1]
        learners.append(own)
    batch = [i for own in learners for i in own]
    for own in learners if scale != "none" else ():
        # root mean square over unshared steps, each episode with the same weight
        unshared = [
            advantages[i][start_of(episodes[i]) :] for i in (own if scale == "group" else batch)
        ]
        squares = [float(np.mean(values**2)) for values in unshared if len(values)]
        divisor = float(np.sqrt(np.mean(squares or 0.0))) + STD_EPSILON
        for i in own:
            advantages[i] = advantages[i] / divisor
    return [values.astype(np.float32) for values in advantages]


def _visits(episodes: Sequence[Episode], members: Sequence[int]) -> dict[Hashable, list[Visit]]:
    """Return the visits of each state, without shared steps."""
    visits: dict[Hashable, list[Visit]] = {}
    for i in members:
        for t in range(start_of(episodes[i]), len(episodes[i].rewards)):
            visits.setdefault(episodes[i].anchors[t], []).append((i, t))
    return visits


def _back_up(episode: Episode, values: dict[Hashable, float], gamma: float) -> Floats:
    """Return the rewards up to the next state with a value, plus that value; shape (S,)."""
    totals = np.zeros(len(episode.rewards))
    ahead = 0.0
    for t in range(len(totals) - 1, -1, -1):
        totals[t] = episode.rewards[t] + gamma * ahead
        ahead = values.get(episode.anchors[t], totals[t])
    return totals
