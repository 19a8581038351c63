"""Branching: advantages measured by several continuations of the same state.

``--advantage_estimator agent_trainers.experimental.branching:vine`` (or ``:tree``) attaches
`Branching`; ``--extensions '{"agent_trainers.experimental.branching:Branching": {"budget": 2}}'``
sets its budget. A branch is an episode with ``start > 0``: it shares its first ``start`` steps with
the episode it branched off. States of a group are equal if their whole history is; the option
``states="observation"`` pools those with the same observation, as in `gigpo`, which is biased where
later rewards depend on what the observation does not show.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.algorithms import episodes as credit
from agent_trainers.algorithms.advantages import find_estimator
from agent_trainers.algorithms.episodes import (
    Array,
    Floats,
    Scale,
    above,
    divide_by_rms,
    groups,
    is_rounding,
    returns_to_go,
)
from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trajectory import Trajectory

NUM_ROUNDS: Final = 2
"""Branches of the first round show where returns vary; those of the second go there."""
_BRANCH_DRAWS: Final = 2
"""Separates the random draws of branches from those of episodes, whose second number is 0 or 1."""
Visit = tuple[int, int]
"""An episode and a step of it."""
States = Literal["history", "observation"]


class Episode(credit.Episode, Protocol):
    """Fields of an episode or branch."""

    @property
    def start(self) -> int:
        """First step that the episode does not share with another."""


def vine(
    episodes: Sequence[Episode],
    *,
    gamma: float = 1.0,
    scale: Scale = "group",
    states: States = "history",
) -> list[Array]:
    """Estimate ``r_t + gamma V(s_{t+1}) - V(s_t)`` per step, with values measured by branches.

    VinePPO (arXiv 2410.01679, section 4) over environment steps. ``V`` is the mean return from the
    state over branches, the episode and others of the group. A state with a single visit has no
    value: the return extends to the next state with one, and the step has the advantage of the step
    before. ``V(s_t)`` leaves out the episode itself; without branches and equal states this is
    `rloo`. Branches have advantage 0. `scale` is that of `grpo_step`, over unshared steps.
    """
    return _value_differences(episodes, gamma, scale, states, branches_learn=False)


def tree(
    episodes: Sequence[Episode],
    *,
    gamma: float = 1.0,
    scale: Scale = "group",
    states: States = "history",
) -> list[Array]:
    """Estimate the advantages of `vine` for branches, too.

    As in Tree-GRPO (arXiv 2509.21240) and ARPO (arXiv 2507.19849). The shared steps of a branch
    have advantage 0, because they count in the episode it branched off.
    """
    return _value_differences(episodes, gamma, scale, states, branches_learn=True)


def rtmc(
    episodes: Sequence[Episode],
    *,
    gamma: float = 1.0,
    scale: Scale = "group",
    states: States = "history",
) -> list[Array]:
    """Estimate the advantages of `vine` without branches, from equal states of the group alone.

    RTMC (arXiv 2604.11037), which pools the returns of parallel rollouts into values of states.
    """
    return vine(episodes, gamma=gamma, scale=scale, states=states)


vine.uses_branches = tree.uses_branches = True  # type: ignore[attr-defined]
tree.trains_branches = True  # type: ignore[attr-defined]
vine.extension = tree.extension = (  # type: ignore[attr-defined]
    "agent_trainers.experimental.branching:Branching"
)


def allocate_branches(
    episodes: Sequence[Episode],
    budget: float,
    *,
    gamma: float = 1.0,
    states: States = "history",
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
    candidates = _candidates(episodes, gamma, states, from_branches=from_branches)
    gains = np.array([candidate.gain(0) for candidate in candidates])
    costs = np.array([candidate.cost for candidate in candidates])
    num_new = [0] * len(candidates)
    while True:
        gains[costs > budget] = 0.0
        if not gains.any():
            return counts
        best = int(gains.argmax())
        budget -= costs[best]
        i, t = candidates[best].visits[num_new[best] % len(candidates[best].visits)]
        counts[i][t] += 1
        num_new[best] += 1
        gains[best] = candidates[best].gain(num_new[best])


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
    episodes: Sequence[Episode], gamma: float, states: States, *, from_branches: bool
) -> list[_Candidate]:
    returns, keys = returns_to_go(episodes, gamma), _state_keys(episodes, states)
    found = []
    for members in groups(episodes).values():
        spreads = _spreads([returns[i] for i in members if episodes[i].start == 0])
        for visits in _visits(episodes, keys, members).values():
            places = [
                (i, t)
                for i, t in visits
                if t > episodes[i].start and (from_branches or episodes[i].start == 0)
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
    episodes: Sequence[Episode], gamma: float, scale: Scale, states: States, *, branches_learn: bool
) -> list[Array]:
    returns, keys = returns_to_go(episodes, gamma), _state_keys(episodes, states)
    advantages = [np.zeros(len(values)) for values in returns]
    learners = []
    for members in groups(episodes).values():
        visits = _visits(episodes, keys, members)
        values = {
            state: float(np.mean([returns[i][t] for i, t in same]))
            for state, same in visits.items()
            if len({i for i, _ in same}) > 1
        }
        backed_up = {i: _back_up(episodes[i], keys[i], values, gamma) for i in members}
        own = [i for i in members if branches_learn or episodes[i].start == 0]
        for i in own:
            start = episodes[i].start
            for t in range(start, len(returns[i])):
                visited = visits[keys[i][t]]
                others = [backed_up[j][u] for j, u in visited if j != i]
                if others:
                    advantages[i][t] = above(backed_up[i][t], np.mean(others))
                elif t > start:
                    advantages[i][t] = advantages[i][t - 1]
        learners.append(own)
    starts = [episode.start for episode in episodes]
    unshared = [values[start:] for values, start in zip(advantages, starts, strict=True)]
    scaled = divide_by_rms(unshared, learners, scale)
    return [
        np.pad(own, (len(values) - len(own), 0))
        for own, values in zip(scaled, advantages, strict=True)
    ]


def _state_keys(episodes: Sequence[Episode], states: States) -> list[Sequence[Hashable]]:
    """Return the key of the state before each step of each episode, (S,) each."""
    field = lookup({"history": "states", "observation": "anchors"}, states, kind="states")
    return [getattr(episode, field) for episode in episodes]


def _visits(
    episodes: Sequence[Episode], keys: Sequence[Sequence[Hashable]], members: Sequence[int]
) -> dict[Hashable, list[Visit]]:
    """Return the visits of each state, without shared steps."""
    visits: dict[Hashable, list[Visit]] = {}
    for i in members:
        for t in range(episodes[i].start, len(episodes[i].rewards)):
            visits.setdefault(keys[i][t], []).append((i, t))
    return visits


def _back_up(
    episode: Episode, keys: Sequence[Hashable], values: Mapping[Hashable, float], gamma: float
) -> Floats:
    """Return the rewards up to the next state with a value, plus that value; shape (S,)."""
    totals = np.zeros(len(episode.rewards))
    ahead = 0.0
    for t in range(len(totals) - 1, -1, -1):
        totals[t] = episode.rewards[t] + gamma * ahead
        ahead = values.get(keys[t], totals[t])
    return totals


class Branching(Extension):
    """Collects training batches with branches; all processes collect theirs at the same time."""

    def __init__(self, budget: float = 1 / 3) -> None:
        """Allow `budget` environment steps of branches, without replays, per step of episodes.

        Raises:
            ConfigurationError: If `budget` is negative or not finite.
        """
        if not 0 <= budget < float("inf"):
            raise ConfigurationError(f"budget must be a number of at least 0, not {budget}.")
        self._budget = budget
        self._reaches_states = False

    def attach(self, trainer: Any) -> None:
        """Take part in the run of `trainer`."""
        args, name = trainer.args, trainer.args.advantage_estimator
        self._trains_branches = bool(getattr(find_estimator(name), "trains_branches", False))
        rollout = trainer.rollouts.collectors["train"]
        problem = None
        if not hasattr(rollout, "branch_many"):
            problem = "Branching restores states of an environment, which programs do not have."
        elif not getattr(find_estimator(name), "uses_branches", False):
            problem = f"Branching does nothing with advantage_estimator={name!r}."
        elif args.max_extra_groups:
            problem = f"{name!r} compares states, not groups: leave out max_extra_groups."
        if problem is not None:
            raise ConfigurationError(
                f"{problem} Or use another advantage_estimator: "
                "agent_trainers.experimental.branching:tree, or grpo_step without Branching."
            )
        super().attach(trainer)
        self._rollout = rollout

    def is_trained(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory is an episode, or a branch that is trained, too."""
        return trajectory.start == 0 or self._trains_branches

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        step: tuple[int, int],
        reward_factors: Mapping[str, float],
    ) -> list[Trajectory]:
        """Collect an episode for each spec, each followed by its branches.

        They depend on the place in the run and the batch of all processes, not on their number.
        """
        families = [[trajectory] for trajectory in self._rollout.collect(specs)]
        for number in range(NUM_ROUNDS):
            self._add_branches(families, (*step, number), reward_factors)
        return [trajectory for family in families for trajectory in family]

    def _add_branches(
        self,
        families: list[list[Trajectory]],
        place: tuple[int, int, int],
        reward_factors: Mapping[str, float],
    ) -> None:
        """Run one round of branches and append them to the families of their episodes.

        Raises:
            SnapshotError: In all processes, if no state was reached in this run.
        """
        processes, args = self.trainer.processes, self.trainer.args
        own = [(trajectory, family) for family in families for trajectory in family]
        summaries = [summarise(trajectory, reward_factors) for trajectory, _ in own]
        everyone, first = processes.all_gather_objects(summaries), processes.num_before(len(own))
        spent = sum(episode.num_steps - episode.start for episode in everyone if episode.start)
        num_steps = sum(episode.num_steps for episode in everyone if not episode.start)
        counts = allocate_branches(
            everyone,
            self._budget * num_steps * (place[-1] + 1) / NUM_ROUNDS - spent,
            gamma=args.gamma,
            states=args.estimator_settings.get("states", "history"),
            from_branches=self._trains_branches,
        )
        chosen = [
            (i, t) for i in range(len(own)) for t in np.flatnonzero(counts[first + i]).tolist()
        ]
        continuations: list[list[Trajectory]] = [[] for _ in chosen]
        refusal = ""
        try:
            continuations = self._rollout.branch_many(
                [(own[i][0], t) for i, t in chosen],
                [counts[first + i][t] for i, t in chosen],
                rng=[
                    np.random.default_rng((args.seed, _BRANCH_DRAWS, *place, first + i, t))
                    for i, t in chosen
                ],
            ).continuations
        except SnapshotError as error:
            refusal = str(error)
        refusals = processes.all_gather_objects([refusal] if chosen else [])
        self._reaches_states |= "" in refusals
        if refusals and not self._reaches_states:
            raise SnapshotError(
                f"advantage_estimator={args.advantage_estimator!r} restores states, but: "
                f"{refusals[0]} Or use another estimator, such as grpo_step."
            )
        for (i, _), branches in zip(chosen, continuations, strict=True):
            own[i][1].extend(branches)
