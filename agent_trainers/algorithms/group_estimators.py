"""Advantages without a critic, relative to the group of the same task or to the batch."""

from collections.abc import Hashable, Sequence
from typing import Final, Literal

import numpy as np

from agent_trainers.algorithms.episodes import (
    Array,
    Episode,
    Floats,
    above,
    groups,
    returns_to_go,
    whiten,
)

Scale = Literal["group", "batch", "none"]

STD_EPSILON: Final = 1e-4
"""Added to a group's standard deviation, as TRL does."""


def grpo(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Give every step of an episode its group-normalised return.

    ``A_i = (R_i - mean) / (std + 1e-4)`` over the group of the same task (Shao et al., 2024, arXiv
    2402.03300, section 4.1.2), with ``R_i`` the discounted return of the episode. `scale` divides
    by the deviation of the ``group``, of the ``batch``, or not at all (``none``).
    """
    totals = [values[:1] for values in returns_to_go(episodes, gamma)]
    advantages = _normalise(episodes, totals, scale)
    return [np.repeat(a, len(e.rewards)) for e, a in zip(episodes, advantages, strict=True)]


def grpo_step(
    episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group"
) -> list[Array]:
    """Give each step its group-normalised return-to-go.

    ``A_{i,t} = (G_{i,t} - mean) / (std + 1e-4)`` with ``G_{i,t} = sum_{k>=t} gamma^(k-t) r_{i,k}``.
    Mean and variance are taken over all steps of the group, each episode with the same weight
    whatever its length, so that neither long episodes nor a step's number shift the baseline. Where
    all reward comes at the end and ``gamma`` is 1, this is `grpo`.
    """
    return _normalise(episodes, returns_to_go(episodes, gamma), scale)


def dr_grpo(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Array]:
    """Give every step of an episode its return less the group's mean.

    `grpo` without the division by the deviation (Liu et al., 2025, arXiv 2503.20783).
    """
    return grpo(episodes, gamma=gamma, scale="none")


def rloo(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Array]:
    """Give every step its episode's return less the mean of the group's others.

    ``A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean)`` (Ahmadian et al., 2024, arXiv
    2402.14740); 0 where there are no others.
    """
    advantages = dr_grpo(episodes, gamma=gamma)
    for members in groups(episodes).values():
        for i in members:
            advantages[i] *= len(members) / max(1, len(members) - 1)
    return advantages


def reinforce_pp(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Array]:
    """Give each step its return-to-go, whitened over the action tokens of the whole batch.

    REINFORCE++ (Hu, 2025, arXiv 2501.03262): global instead of group statistics.
    """
    returns = [values.astype(np.float32) for values in returns_to_go(episodes, gamma)]
    return whiten(returns, _token_weights(episodes))


def reinforce_pp_baseline(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Array]:
    """Give every step its return less the group's mean, whitened over the batch's action tokens.

    REINFORCE++-baseline (arXiv 2501.03262); 0 before whitening for a group of one.
    """
    return whiten(dr_grpo(episodes, gamma=gamma), _token_weights(episodes))


def gigpo(
    episodes: Sequence[Episode],
    *,
    gamma: float = 1.0,
    scale: Scale = "group",
    step_advantage_weight: float = 1.0,
) -> list[Array]:
    """Add to the episode's advantage that of the step among steps with the same observation.

    GiGPO (Feng et al., 2025, arXiv 2505.10978): ``A = A^E + w A^S``. ``A^E`` is `grpo`
    of the undiscounted return. ``A^S`` normalises the return-to-go among all steps of the same
    group that saw the same observation, at any place and also within an episode; it is 0 where the
    observation was seen once, so with observations that are all different this is `grpo`.
    """
    advantages = grpo(episodes, scale=scale)
    returns = returns_to_go(episodes, gamma)
    for members in groups(episodes).values():
        places: dict[Hashable, list[tuple[int, int]]] = {}
        for i in members:
            for t, anchor in enumerate(episodes[i].anchors):
                places.setdefault(anchor, []).append((i, t))
        for same in places.values():
            if len(same) < 2:
                continue
            values = np.array([returns[i][t] for i, t in same])
            divisor = 1.0 if scale == "none" else values.std(ddof=1) + STD_EPSILON
            for (i, t), value in zip(same, above(values, values.mean()) / divisor, strict=True):
                advantages[i][t] += step_advantage_weight * value
    return advantages


def _normalise(episodes: Sequence[Episode], values: Sequence[Floats], scale: Scale) -> list[Array]:
    """Subtract the group's mean from each episode's values and divide by the standard deviation."""
    grouped = groups(episodes)
    batch = [i for members in grouped.values() for i in members]
    advantages = [np.zeros(0, np.float32) for _ in episodes]
    for members in grouped.values():
        mean = np.mean([values[i].mean() for i in members])
        divisor = 1.0
        if scale != "none":
            divisor = _std([values[i] for i in (members if scale == "group" else batch)])
            divisor += STD_EPSILON
        for i in members:
            advantages[i] = (above(values[i], mean) / divisor).astype(np.float32)
    return advantages


def _std(values: Sequence[Floats]) -> float:
    """Return the unbiased standard deviation, each episode weighing the same; 0 for a singleton."""
    if len(values) < 2:
        return 0.0
    mean = np.mean([v.mean() for v in values])
    squares = sum(float(np.mean((v - mean) ** 2)) for v in values)
    return float(np.sqrt(squares / (len(values) - 1)))


def _token_weights(episodes: Sequence[Episode]) -> list[Sequence[int]]:
    return [episode.lengths if episode.is_scorable else [] for episode in episodes]
