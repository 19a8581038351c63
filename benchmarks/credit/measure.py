"""True advantages of a batch, from branches of every state until its value is known.

The advantage of a step is ``r_t + V(s_{t+1}) - V(s_t)``. ``V`` is the mean return of branches from
the state, excluding the episode itself, pooled over equal states, and 0 after the last step.
Branches are allocated by Neyman's rule, where they reduce most noise, until the advantages reach
the required reliability.
"""

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from agent_envs.errors import RolloutError
from agent_trainers.algorithms.episodes import discount
from agent_trainers.experimental.branching import allocate_branches
from agent_trainers.rollout.branches import RecordedState
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory, Transition
from benchmarks.credit.gradients import compress
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode, pack

FIRST_BRANCHES: Final = 8
"""Branches of each state before anything is known about its variance."""
MIN_RETURNS: Final = 2
"""One return in each half is needed for a value and its error."""
MAX_ROUNDS: Final = 4
BRANCH_ROUNDS: Final = 2
"""Rounds of branches for the estimators, as in training."""
RIDGE: Final = 1.0
"""Added to the diagonal of the critic's normal equations of standardised features."""
_CRITIC_BATCH: Final = 64
Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _State:
    """A state of the batch and the returns of its branches."""

    place: RecordedState
    """First occurrence."""
    weight: int = 0
    """Number of steps whose advantage contains its value."""
    returns: list[float] = field(default_factory=list)


class Measurement:
    """Rolls out a batch and measures its advantages."""

    def __init__(self, rollout: Rollout, specs: Sequence[EpisodeSpec], seed: int) -> None:
        """Roll out `specs`; `seed` is that of all branches.

        Raises:
            RolloutError: If no episode could be scored.
        """
        self._rollout, self._rng = rollout, np.random.default_rng([seed, 1])
        self._started = time.perf_counter()
        collected = rollout.collect(specs)
        self.trajectories = [t for t in collected if t.is_scorable]
        if not self.trajectories:
            raise RolloutError(
                f"No episode of the batch could be scored. {_first_error(collected)}"
            )
        self._keys = [trajectory.states for trajectory in self.trajectories]
        self._costs = dict.fromkeys(
            ("branch_steps", "truth_steps", "truth_tokens", "truth_branches"), 0.0
        )
        self._states: dict[str, _State] = {}
        for trajectory, keys in zip(self.trajectories, self._keys, strict=True):
            for step, key in enumerate(keys):
                state = self._states.setdefault(key, _State((trajectory, step)))
                state.weight += 1 if step == 0 else 2  # ends one step, begins another

    def measure(self, target: float, max_branches: int) -> None:
        """Roll out branches until the reliability is `target`, or each state has `max_branches`.

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
        model: Any = None,
    ) -> CreditBatch:
        """Return the batch with its true advantages, and the gradients of its steps.

        `values` are a critic's, for each episode; without `model` there are no gradients.
        """
        means = self._means()
        errors = dict(zip(self._states, self._squared_errors(), strict=True))
        halves = [
            {key: float(np.mean(state.returns[half::2])) for key, state in self._states.items()}
            for half in range(2)
        ]
        packed: list[str] = []
        energy = 0.0
        if model is not None:
            steps = [step for trajectory in self.trajectories for step in trajectory.transitions]
            compressed, energy = compress(gram_matrix(model, steps))
            packed = [pack(vector) for vector in compressed]
        gradients = iter(packed)
        episodes = []
        for i, (trajectory, keys) in enumerate(zip(self.trajectories, self._keys, strict=True)):
            here, ahead = _here_and_ahead(keys, errors)
            episodes.append(
                replace(
                    describe(trajectory),
                    gradients=list(itertools.islice(gradients, len(keys))),
                    values=[list(map(float, v)) for v in values[i]] if values is not None else [],
                    advantages=_rounded(_advantages(trajectory, keys, means)),
                    standard_errors=_rounded(np.sqrt(here + ahead)),
                    halves=[_rounded(_advantages(trajectory, keys, half)) for half in halves],
                )
            )
        variance, noise = self._variance_of_advantages()
        return CreditBatch(
            environment=environment,
            stage=stage,
            seed=seed,
            success=float(np.mean([t.success for t in self.trajectories])),
            reliability=split_half_reliability(episodes),
            reliability_by_variance=1.0 - noise / variance if variance > 0 else float("nan"),
            costs={
                "episode_steps": float(self._num_steps), **self._costs,
                "seconds": round(time.perf_counter() - self._started, 1),
            },
            episodes=[*episodes, *map(describe, branches)],
            gradient_energy=round(energy, 6),
        )  # fmt: skip

    def roll_out_visible_branches(self, share: float) -> list[Trajectory]:
        """Return branches for the estimators, of at most `share` times the batch's own steps."""
        budget = share * self._num_steps
        branches: list[Trajectory] = []
        for number in range(1, BRANCH_ROUNDS + 1):
            known = [*self.trajectories, *branches]
            counts = allocate_branches(
                known,
                budget * number / BRANCH_ROUNDS - self._costs["branch_steps"],
            )
            states = [(t, step) for t, ks in zip(known, counts, strict=True)
                      for step in np.flatnonzero(ks).tolist()]  # fmt: skip
            if states:
                found = self._rollout.branch_many(
                    states, [k for ks in counts for k in ks if k], rng=self._rng
                )
                self._costs["branch_steps"] += found.environment_steps
                branches += [b for same in found.continuations for b in same if b.is_scorable]
        return branches

    @property
    def _num_steps(self) -> int:
        return sum(map(len, self._keys))

    def _branch(self, states: Sequence[_State], counts: Sequence[int]) -> None:
        chosen = [(state, count) for state, count in zip(states, counts, strict=True) if count]
        found = self._rollout.branch_many(
            [state.place for state, _ in chosen], [count for _, count in chosen], rng=self._rng
        )
        results = zip(chosen, found.returns(), found.continuations, strict=True)
        for (state, _), returns, branches in results:
            state.returns += returns
            if len(state.returns) < MIN_RETURNS:
                trajectory, step = state.place
                raise RolloutError(
                    f"The state before step {step} of task {trajectory.task_id!r} has no value: "
                    f"{len(returns)} of {len(branches)} branches could be scored. "
                    f"{_first_error(branches)}"
                )
        self._costs["truth_steps"] += found.environment_steps
        self._costs["truth_tokens"] += found.usage.completion_tokens
        self._costs["truth_branches"] += sum(map(len, found.continuations))

    def _means(self) -> dict[str, float]:
        return {key: float(np.mean(state.returns)) for key, state in self._states.items()}

    def _counts(self) -> Array:
        return np.array([len(s.returns) for s in self._states.values()], float)

    def _variances(self) -> Array:
        """Return the variance of returns per state, shrunk towards that of all states."""
        counts = self._counts()
        squares = np.array([np.var(s.returns) * len(s.returns) for s in self._states.values()])
        prior = squares.sum() / max(1.0, (counts - 1.0).sum())
        variances: Array = (squares + prior) / counts
        return variances

    def _squared_errors(self) -> Array:
        errors: Array = self._variances() / self._counts()
        return errors

    def _weights(self) -> Array:
        return np.array([state.weight for state in self._states.values()], float)

    def _variance_of_advantages(self) -> tuple[float, float]:
        """Return the variance of all measured advantages, and its share that is noise."""
        means = self._means()
        pairs = zip(self.trajectories, self._keys, strict=True)
        advantages = np.concatenate([_advantages(t, keys, means) for t, keys in pairs])
        noise = float((self._weights() * self._squared_errors()).sum()) / len(advantages)
        return float(np.var(advantages)), noise

    def _allocate(self, target: float, max_branches: int) -> list[int]:
        """Return how many further branches each state gets, an even number."""
        variance, noise = self._variance_of_advantages()
        true = max(variance - noise, 0.0)
        allowed = true * (1.0 - target) / target
        if noise <= allowed or true == 0.0:
            return [0] * len(self._states)
        need = np.sqrt(self._weights() * self._variances())
        # the smallest counts n for which sum(weight * variance / n) is num_steps * allowed
        wanted = need * need.sum() / (self._num_steps * allowed)
        wanted = np.minimum(np.ceil(wanted / 2) * 2, max_branches)
        more: list[int] = np.maximum(wanted - self._counts(), 0).astype(int).tolist()
        return more


class FittedCritic:
    """A linear value head on a policy's hidden states, fitted by ridge regression.

    It is fitted to the returns-to-go of other episodes of the same policy, so that GAE is scored
    with a good critic, and not by how long one was trained.
    """

    def __init__(self, model: Any, pad_token_id: int, episodes: Sequence[Trajectory]) -> None:
        """Fit a head on the body of `model` to the returns of `episodes`."""
        self._body, self._pad = model.model, pad_token_id
        steps = [transition for episode in episodes for transition in episode.transitions]
        returns = np.concatenate([discount(t.rewards, 1.0) for t in episodes])
        features = self._features(steps)
        x = np.concatenate(features)
        y = np.repeat(returns, [len(each) for each in features])
        self._mean, self._scale = x.mean(0), x.std(0) + 1e-6
        x = (x - self._mean) / self._scale
        self._bias = float(y.mean())
        gram = x.T @ x + RIDGE * np.eye(x.shape[1])
        self._weights: Array = np.linalg.solve(gram, x.T @ (y - self._bias))

    def values(self, episodes: Sequence[Trajectory]) -> list[list[list[float]]]:
        """Return the value before each token of each step of each episode."""
        steps = [transition for episode in episodes for transition in episode.transitions]
        features = iter(self._features(steps))
        return [[self._value(next(features)) for _ in e.transitions] for e in episodes]

    def _value(self, features: Array) -> list[float]:
        values = (features - self._mean) / self._scale @ self._weights + self._bias
        rounded: list[float] = np.round(values, 4).tolist()
        return rounded

    @torch.no_grad()
    def _features(self, steps: Sequence[Transition]) -> list[Array]:
        """Return the hidden state before each token of each action, (tokens, H) each."""
        found: list[Array] = []
        for i in range(0, len(steps), _CRITIC_BATCH):
            some = steps[i : i + _CRITIC_BATCH]
            rows = [torch.tensor([*t.prompt_ids, *t.completion_ids]) for t in some]
            ids = pad_sequence(rows, batch_first=True, padding_value=self._pad)
            hidden = self._body(input_ids=ids.to(self._body.device)).last_hidden_state
            for row, step in zip(hidden.double().cpu().numpy(), some, strict=True):
                start = len(step.prompt_ids) - 1
                found.append(row[start : start + len(step.completion_ids)])
        return found


def gram_matrix(model: Any, steps: Sequence[Transition]) -> Array:
    """Return the inner products of the steps' gradients of log-probability, (S, S).

    The gradient of a step is that of the summed log-probability of its action's tokens, with
    respect to all weights. Steps with equal tokens are computed once.
    """
    tokens = [(tuple(step.prompt_ids), tuple(step.completion_ids)) for step in steps]
    places = {pair: row for row, pair in enumerate(dict.fromkeys(tokens))}
    weights = list(model.parameters())
    gradients = [torch.empty(len(places), weight.numel()) for weight in weights]
    for row, (prompt, completion) in enumerate(places):
        ids = torch.tensor([[*prompt, *completion]], device=weights[0].device)
        logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[0, -len(completion) :, None])
        for all_rows, gradient in zip(
            gradients, torch.autograd.grad(logprobs.sum(), weights), strict=True
        ):
            all_rows[row] = gradient.flatten()
    gram = np.sum([(rows @ rows.T).double().numpy() for rows in gradients], axis=0)
    of_steps = [places[pair] for pair in tokens]
    expanded: Array = gram[np.ix_(of_steps, of_steps)]
    return expanded


def describe(trajectory: Trajectory) -> CreditEpisode:
    """Return an episode as estimators see it, with digests of its texts."""
    return CreditEpisode(
        group_id=trajectory.group_id,
        rewards=[float(reward) for reward in trajectory.rewards],
        lengths=trajectory.lengths,
        anchors=[
            hashlib.sha256(anchor.encode(errors="surrogatepass")).hexdigest()[:12]
            for anchor in trajectory.anchors
        ],
        states=trajectory.states,
        reward_terms=trajectory.reward_terms,
        is_truncated=trajectory.is_truncated,
        start=trajectory.start,
    )


def split_half_reliability(episodes: Sequence[CreditEpisode]) -> float:
    """Return the share of the advantages' variance that is not noise.

    The correlation of the advantages from two halves of the branches, corrected to all branches
    (Spearman and Brown, 1910); NaN if the advantages do not vary.
    """
    halves = np.array([np.concatenate([e.halves[h] for e in episodes]) for h in range(2)])
    if halves.std(axis=1).min() == 0.0:
        return float("nan")
    correlation = float(np.corrcoef(halves)[0, 1])
    return 2.0 * correlation / (1.0 + correlation)


def _first_error(trajectories: Sequence[Trajectory]) -> str:
    errors = [t.error.strip().splitlines()[-1] for t in trajectories if t.error]
    return f"The first error: {errors[0]}" if errors else "No error was recorded."


def _advantages(trajectory: Trajectory, keys: Sequence[str], values: dict[str, float]) -> Array:
    here, ahead = _here_and_ahead(keys, values)
    advantages: Array = np.array(trajectory.rewards, float) + (ahead - here)
    return advantages


def _here_and_ahead(keys: Sequence[str], values: dict[str, float]) -> tuple[Array, Array]:
    """Return a number of the states before and after each step, (S,) each; 0 after the last."""
    here = np.array([values[key] for key in keys])
    return here, np.append(here[1:], 0.0)


def _rounded(values: Array) -> list[float]:
    numbers: list[float] = np.round(values, 6).tolist()
    return numbers
