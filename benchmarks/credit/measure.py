"""The true advantages of a batch: every state is gone on from until its value is known.

The advantage of a step is ``r_t + V(s_{t+1}) - V(s_t)``. ``V`` is the mean return of branches from
the state (none of them the episode itself), pooled over equal states, and 0 after the last step.
Branches go where they take most noise off (Neyman's allocation): as many as the square root of how
often a state counts, times how much returns from it vary, until the advantages are as reliable as
asked for.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from agent_envs.errors import RolloutError
from agent_trainers.experimental.branching.branch_estimators import allocate_branches
from agent_trainers.experimental.branching.branches import RecordedState
from agent_trainers.experimental.branching.saved_states import key_before
from agent_trainers.rollout.collector import EpisodeSpec, Rollout
from agent_trainers.trajectory import Trajectory
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode

FIRST_BRANCHES: Final = 16
"""Of each state, before anything is known of it."""
MIN_RETURNS: Final = 2
"""Without which there is no value of a state and no error of it: one in each half."""
MAX_ROUNDS: Final = 4
"""Of allocating branches; the variances that a round shows are those that the next goes by."""
BRANCH_ROUNDS: Final = 2
"""In which the branches that estimators see are played, as in training."""
Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _State:
    """A state of the batch, and what became of those who went on from it."""

    place: RecordedState
    """Where it was met first."""
    weight: int = 0
    """How many steps' advantages it counts in."""
    returns: list[float] = field(default_factory=list)


class Measurement:
    """Plays a batch and measures its steps."""

    def __init__(self, rollout: Rollout, specs: Sequence[EpisodeSpec], seed: int) -> None:
        """Play `specs` by the policy of `rollout`; `seed` is that of every draw of branches.

        Raises:
            RolloutError: If no episode could be scored.
        """
        self._rollout, self._rng = rollout, np.random.default_rng([seed, 1])
        self._started = time.perf_counter()
        played = rollout.collect(specs)
        self.trajectories = [t for t in played if t.is_scorable]
        if not self.trajectories:
            raise RolloutError(f"No episode of the batch could be scored. {_first_error(played)}")
        self._keys = [
            [key_before(t, step)[:16] for step in range(len(t.transitions))]
            for t in self.trajectories
        ]
        self._costs = dict.fromkeys(
            ("branch_steps", "truth_steps", "truth_tokens", "truth_branches"), 0.0
        )
        self._states: dict[str, _State] = {}
        for trajectory, keys in zip(self.trajectories, self._keys, strict=True):
            for step, key in enumerate(keys):
                state = self._states.setdefault(key, _State((trajectory, step)))
                state.weight += 1 if step == 0 else 2  # ends one step, begins another

    def go_on(self, target: float, max_branches: int) -> None:
        """Play branches until the reliability is `target`, or each state has `max_branches`.

        Raises:
            RolloutError: If branches of a state fail, so that it has no value.
        """
        states = list(self._states.values())
        self._branch(states, [min(FIRST_BRANCHES, max_branches)] * len(states))
        for _ in range(MAX_ROUNDS - 1):
            wanted = self._allocate(target, max_branches)
            if not any(wanted):
                return
            self._branch(states, wanted)

    def batch(
        self,
        *,
        environment: str,
        stage: str,
        seed: int,
        values: Sequence[Sequence[Sequence[float]]] | None = None,
        branches: Sequence[Trajectory] = (),
    ) -> CreditBatch:
        """Return the batch with its true advantages; `values` are a critic's, for each episode."""
        means = {key: float(np.mean(state.returns)) for key, state in self._states.items()}
        errors = dict(zip(self._states, self._squared_errors(), strict=True))
        halves = [
            {key: float(np.mean(state.returns[half::2])) for key, state in self._states.items()}
            for half in range(2)
        ]
        episodes = []
        for i, (trajectory, keys) in enumerate(zip(self.trajectories, self._keys, strict=True)):
            noise = _ahead_and_here(keys, errors, sign=1.0)
            episodes.append(
                replace(
                    describe(trajectory),
                    states=keys,
                    values=[list(map(float, v)) for v in values[i]] if values is not None else [],
                    advantages=_rounded(_differences(trajectory, keys, means)),
                    standard_errors=_rounded(np.sqrt(noise)),
                    halves=[_rounded(_differences(trajectory, keys, half)) for half in halves],
                )
            )
        steps = sum(len(t.transitions) for t in self.trajectories)
        return CreditBatch(
            environment=environment,
            stage=stage,
            seed=seed,
            success=float(np.mean([t.success for t in self.trajectories])),
            reliability=split_half_reliability(episodes),
            reliability_by_variance=self._reliability(),
            costs={
                "episode_steps": float(steps), **self._costs,
                "seconds": round(time.perf_counter() - self._started, 1),
            },
            episodes=[*episodes, *map(describe, branches)],
        )  # fmt: skip

    def play_seen_branches(self, share: float) -> list[Trajectory]:
        """Play the branches that estimators see: at most `share` times the batch's own steps."""
        budget = share * sum(len(t.transitions) for t in self.trajectories)
        branches: list[Trajectory] = []
        for number in range(1, BRANCH_ROUNDS + 1):
            everyone = [*self.trajectories, *branches]
            counts = allocate_branches(
                everyone,
                budget * number / BRANCH_ROUNDS - self._costs["branch_steps"],
                replays=[self._rollout.replays(each) for each in everyone],
            )
            states = [(t, step) for t, own in zip(everyone, counts, strict=True)
                      for step in np.flatnonzero(own).tolist()]  # fmt: skip
            ks = [count for own in counts for count in own if count]
            if states:
                played = self._rollout.branch_many(states, ks, rng=self._rng)
                self._costs["branch_steps"] += played.num_steps
                branches += [b for same in played.continuations for b in same if b.is_scorable]
        return branches

    def _branch(self, states: Sequence[_State], counts: Sequence[int]) -> None:
        chosen = [(state, count) for state, count in zip(states, counts, strict=True) if count]
        played = self._rollout.branch_many(
            [state.place for state, _ in chosen], [count for _, count in chosen], rng=self._rng
        )
        found = zip(chosen, played.returns(), played.continuations, strict=True)
        for (state, _), returns, branches in found:
            state.returns += returns
            if len(state.returns) < MIN_RETURNS:
                trajectory, step = state.place
                raise RolloutError(
                    f"The state before step {step} of task {trajectory.task_id!r} has no value: of "
                    f"{len(branches)} branches {len(returns)} could be scored. "
                    f"{_first_error(branches)}"
                )
        self._costs["truth_steps"] += played.num_steps
        self._costs["truth_tokens"] += played.usage.completion_tokens
        self._costs["truth_branches"] += sum(map(len, played.continuations))

    def _variances(self) -> Array:
        """Return that of returns from each state, drawn a little to that of all states."""
        states = list(self._states.values())
        squares = np.array([np.var(s.returns) * len(s.returns) for s in states])
        counts = np.array([len(s.returns) for s in states], float)
        prior = squares.sum() / max(1.0, (counts - 1.0).sum())
        spread: Array = (squares + prior) / counts
        return spread

    def _squared_errors(self) -> Array:
        counts = np.array([len(s.returns) for s in self._states.values()], float)
        errors: Array = self._variances() / counts
        return errors

    def _weights(self) -> Array:
        return np.array([state.weight for state in self._states.values()], float)

    def _variance_of_advantages(self) -> tuple[float, float]:
        """Return that of all steps' advantages as measured, and how much of it is noise."""
        means = {key: float(np.mean(state.returns)) for key, state in self._states.items()}
        pairs = zip(self.trajectories, self._keys, strict=True)
        advantages = np.concatenate([_differences(t, keys, means) for t, keys in pairs])
        noise = float((self._weights() * self._squared_errors()).sum()) / len(advantages)
        return float(np.var(advantages)), noise

    def _reliability(self) -> float:
        measured, noise = self._variance_of_advantages()
        return 1.0 - noise / measured if measured > 0 else float("nan")

    def _allocate(self, target: float, max_branches: int) -> list[int]:
        """Return how many more branches each state gets, an even number."""
        measured, noise = self._variance_of_advantages()
        true = max(measured - noise, 0.0)
        allowed = true * (1.0 - target) / target
        if noise <= allowed or true == 0.0:
            return [0] * len(self._states)
        counts = np.array([len(s.returns) for s in self._states.values()])
        num_steps = sum(map(len, self._keys))
        need = np.sqrt(self._weights() * self._variances())
        # of all n for which the sum of weight * variance / n is num_steps * allowed, the fewest
        wanted = need * need.sum() / (num_steps * allowed)
        wanted = np.minimum(np.ceil(wanted / 2) * 2, max_branches)
        more: list[int] = np.maximum(wanted - counts, 0).astype(int).tolist()
        return more


def describe(trajectory: Trajectory) -> CreditEpisode:
    """Return an episode as estimators see it; texts become digests."""
    return CreditEpisode(
        group_id=trajectory.group_id,
        rewards=[float(reward) for reward in trajectory.rewards],
        lengths=trajectory.lengths,
        anchors=[_digest(anchor) for anchor in trajectory.anchors],
        is_truncated=trajectory.is_truncated,
        start=trajectory.start,
    )


def _first_error(trajectories: Sequence[Trajectory]) -> str:
    errors = [t.error.strip().splitlines()[-1] for t in trajectories if t.error]
    return f"The first error: {errors[0]}" if errors else "No error was kept."


def split_half_reliability(episodes: Sequence[CreditEpisode]) -> float:
    """Return the share of the advantages' variance that is no noise.

    The correlation of the advantages from two halves of the branches, stepped up to all of them
    (Spearman and Brown, 1910); NaN where nothing varies.
    """
    halves = np.array([np.concatenate([e.halves[h] for e in episodes]) for h in range(2)])
    if halves.std(axis=1).min() == 0.0:
        return float("nan")
    correlation = float(np.corrcoef(halves)[0, 1])
    return 2.0 * correlation / (1.0 + correlation)


def _differences(trajectory: Trajectory, keys: Sequence[str], values: dict[str, float]) -> Array:
    differences = _ahead_and_here(keys, values, sign=-1.0)
    advantages: Array = np.array(trajectory.rewards, float) + differences
    return advantages


def _ahead_and_here(keys: Sequence[str], values: dict[str, float], *, sign: float) -> Array:
    """Return the value ahead of each step plus `sign` times that before it, shape (S,)."""
    here = np.array([values[key] for key in keys])
    ahead = np.append(here[1:], 0.0)
    combined: Array = ahead + sign * here
    return combined


def _rounded(values: Array) -> list[float]:
    numbers: list[float] = np.round(values, 6).tolist()
    return numbers


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
