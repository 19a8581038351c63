"""Advantages from branches: what a state is worth is seen by going on from it more than once.

A branch is an episode whose ``start`` is not 0: its steps before that are those of the episode it
branched off. Equal states of a group are pooled: those with the same anchor, as in `gigpo`.
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
"""A step of an episode of the batch."""


def vine(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Give each step what its state's value changes by: ``r_t + gamma V(s_{t+1}) - V(s_t)``.

    VinePPO (Kazemnejad et al., 2024, arXiv 2410.01679, section 4) with environment steps for steps.
    ``V`` is the mean return of all that went on from the state or an equal one: branches, the
    episode itself, others of its group. A state that was seen once has no value of its own: the
    return runs on to the next one that has, and the step shares the advantage of the step before.
    ``V(s_t)`` leaves the episode itself out, as `rloo` does; without branches and equal states this
    is `rloo`. Branches only measure: their advantages are 0.

    `scale` divides by the root mean square of the ``group``'s advantages plus 1e-4, of the
    ``batch``'s, or not at all (``none``).
    """
    return _value_differences(episodes, gamma, scale, branches_learn=False)


def tree(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Give each step what its state's value changes by, in branches as well.

    Episodes share prefixes, as in Tree-GRPO (Ji et al., 2025, arXiv 2509.21240) and ARPO (Dong et
    al., 2025, arXiv 2507.19849), and a step is compared with the others at its fork. The advantages
    are those of `vine`; but branches are episodes from which is learned, too. Steps that a branch
    shares have advantage 0 in it: they count once, where they were played.
    """
    return _value_differences(episodes, gamma, scale, branches_learn=True)


vine.uses_branches = tree.uses_branches = True  # type: ignore[attr-defined]
tree.trains_branches = True  # type: ignore[attr-defined]
vine.extension = tree.extension = (  # type: ignore[attr-defined]
    "agent_trainers.experimental.branching:Branching"
)


def uses_branches(estimator: str | Estimator) -> bool:
    """Return whether an estimator reads branches: whether it has an attribute ``uses_branches``."""
    return bool(getattr(find_estimator(estimator), "uses_branches", False))


def start_of(episode: Episode) -> int:
    """Return the first step that an episode does not share with the one it branched off."""
    return int(getattr(episode, "start", 0))


def allocate_branches(
    episodes: Sequence[Episode],
    budget: float,
    *,
    gamma: float = 1.0,
    from_branches: bool = False,
    replays: Sequence[bool] = (),
) -> list[list[int]]:
    """Say how many branches begin before each step, so that values gain most from them.

    One more return from a state that has ``n`` takes ``var / (n (n + 1))`` off the variance of its
    mean, for each step that led there; a branch costs the steps that were left on average, and
    those before it where these have to be taken again. Branches go where gain over cost is largest.
    The variance of few returns is drawn to that of what the group's episodes earned from the same
    step on, so a group in which that never differs gets none.

    Args:
        episodes: Episodes, and branches that are there already.
        budget: Environment steps that branches may take, as far as can be foreseen.
        gamma: Discount per step.
        from_branches: Whether branches may begin in branches.
        replays: Of each episode, whether its states are only reached by taking its steps again;
            none if not given.

    Returns:
        For each episode, counts of shape (S,); 0 for its first state, which its whole group has.
    """
    counts = [[0] * len(episode.rewards) for episode in episodes]
    heap: list[tuple[float, int, _Candidate]] = []
    replays = replays or [False] * len(episodes)
    for candidate in _candidates(episodes, gamma, replays, from_branches=from_branches):
        heapq.heappush(heap, (-candidate.gain(0), len(heap), candidate))
    num_new = [0] * len(heap)
    while heap:
        gain, number, candidate = heapq.heappop(heap)
        if gain >= 0.0 or candidate.cost > budget:
            continue
        budget -= candidate.cost
        i, t = candidate.places[num_new[number] % len(candidate.places)]
        counts[i][t] += 1
        num_new[number] += 1
        heapq.heappush(heap, (-candidate.gain(num_new[number]), number, candidate))
    return counts


class _Candidate(NamedTuple):
    """A state from which branches may begin."""

    places: list[Visit]
    """Where it was met."""
    num_returns: int
    """How many returns from it there are."""
    variance: float
    """Theirs."""
    cost: float
    """Steps that were left there, and that it takes to come there, on average."""

    def gain(self, num_new: int) -> float:
        """Return what one more branch takes off the variance of values, per step it costs."""
        n = self.num_returns + num_new
        return len(self.places) * self.variance / (n * (n + 1)) / self.cost


def _candidates(
    episodes: Sequence[Episode], gamma: float, replays: Sequence[bool], *, from_branches: bool
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
            again = float(np.mean([t * replays[i] for i, t in places]))
            is_constant = is_rounding(variance**0.5, 0.0, epsilon=1e-6)
            variance = 0.0 if is_constant else variance
            found.append(_Candidate(places, len(values), variance, left + again))
    return found


def _spreads(returns: Sequence[Floats]) -> list[float]:
    """Return the variance of returns-to-go over the episodes that got to each step.

    So late states, from which little is left to be earned, are not thought to vary as the whole
    does. A step that only one episode got to has the variance of the step before.
    """
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
    grouped = groups(episodes)
    for members in grouped.values():
        visits = _visits(episodes, members)
        values = {
            state: float(np.mean([returns[i][t] for i, t in same]))
            for state, same in visits.items()
            if len({i for i, _ in same}) > 1
        }
        backed_up = {i: _back_up(episodes[i], values, gamma) for i in members}
        for i in members:
            if branches_learn or start_of(episodes[i]) == 0:
                _compare(i, episodes[i], visits, backed_up, advantages[i])
    learners = [
        [i for i in members if branches_learn or start_of(episodes[i]) == 0]
        for members in grouped.values()
    ]
    batch = [i for members in learners for i in members]
    for members in learners if scale != "none" else ():
        divisor = _root_mean_square(episodes, advantages, members if scale == "group" else batch)
        for i in members:
            advantages[i] /= divisor + STD_EPSILON
    return [values.astype(np.float32) for values in advantages]


def _visits(episodes: Sequence[Episode], members: Sequence[int]) -> dict[Hashable, list[Visit]]:
    """Return where each state was met in steps that episodes do not share."""
    visits: dict[Hashable, list[Visit]] = {}
    for i in members:
        for t in range(start_of(episodes[i]), len(episodes[i].rewards)):
            visits.setdefault(episodes[i].anchors[t], []).append((i, t))
    return visits


def _back_up(episode: Episode, values: dict[Hashable, float], gamma: float) -> Floats:
    """Return rewards up to the next state with a value, and that value; shape (S,)."""
    totals = np.zeros(len(episode.rewards))
    ahead = 0.0
    for t in range(len(totals) - 1, -1, -1):
        totals[t] = episode.rewards[t] + gamma * ahead
        ahead = values.get(episode.anchors[t], totals[t])
    return totals


def _compare(
    i: int,
    episode: Episode,
    visits: dict[Hashable, list[Visit]],
    backed_up: dict[int, Floats],
    advantages: Floats,
) -> None:
    """Write an episode's advantages over what others came to from the same states."""
    for t in range(start_of(episode), len(episode.rewards)):
        others = [backed_up[j][u] for j, u in visits[episode.anchors[t]] if j != i]
        if others:
            baseline = float(np.mean(others))
            advantages[t] = above(backed_up[i][t], baseline)
        elif t > start_of(episode):
            advantages[t] = advantages[t - 1]


def _root_mean_square(
    episodes: Sequence[Episode], advantages: Sequence[Floats], members: Sequence[int]
) -> float:
    """Return that of the steps that episodes do not share, each episode weighing the same."""
    own = [advantages[i][start_of(episodes[i]) :] for i in members]
    squares = [float(np.mean(values**2)) for values in own if len(values)]
    return float(np.sqrt(np.mean(squares))) if squares else 0.0
