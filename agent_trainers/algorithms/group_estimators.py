"""Advantages without a critic, relative to the group of the same task or to the batch."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.episodes import (
    SCALE_EPSILON,
    Array,
    Episode,
    Floats,
    Scale,
    above,
    check_scale,
    discount,
    divide_by_rms,
    groups,
    is_rounding,
    returns_to_go,
    whiten,
)


def grpo(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Give every step of an episode its group-normalised return.

    ``A_i = (R_i - mean) / (std + 1e-4)`` over the group of the same task (Shao et al., 2024, arXiv
    2402.03300, section 4.1.2), with ``R_i`` the discounted return of the episode. `scale` divides
    by the deviation of the ``group``, of the ``batch``, or not at all (``none``).
    """
    totals = [float(values[:1].sum()) for values in returns_to_go(episodes, gamma)]
    return _at_every_step(episodes, _normalise(episodes, np.array(totals), scale))


def grpo_step(
    episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group"
) -> list[Array]:
    """Give each step its return-to-go less the mean of the group's other episodes at that step.

    ``A_{i,t} = G_{i,t} - mean_{j != i} G_{j,t}`` with ``G_{i,t} = sum_{k>=t} gamma^(k-t) r_{i,k}``
    over the episodes that have a step t. Where no other has one, the step gets the advantage of the
    step before, and 0 in a group of one. The baseline does not depend on the action, so the
    gradient is unbiased for any lengths. `scale` divides by the root mean square of the ``group``
    or the ``batch`` plus 1e-4, or not at all (``none``). If all reward comes at the end of
    episodes of equal length, this is `rloo` up to the scale.
    """
    returns = returns_to_go(episodes, gamma)
    grouped = groups(episodes)
    for members in grouped.values():
        table = np.full((len(members), max(len(returns[i]) for i in members)), np.nan)  # (G, S)
        for row, i in enumerate(members):
            table[row, : len(returns[i])] = returns[i]
        num_others = np.isfinite(table).sum(0) - 1
        baselines = (np.nansum(table, 0) - table) / np.maximum(num_others, 1)
        advantages = above(table, baselines)
        for t in np.flatnonzero(num_others == 0):
            advantages[:, t] = advantages[:, t - 1] if t else 0.0
        for row, i in enumerate(members):
            returns[i] = advantages[row, : len(returns[i])]
    return divide_by_rms(returns, grouped.values(), scale)


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
    observation was seen once, so with observations that are all different this is `grpo`. ``batch``
    divides the unscaled sum by the batch's root mean square plus 1e-4.
    """
    advantages = grpo(episodes, scale="group" if scale == "group" else "none")
    returns, grouped = returns_to_go(episodes, gamma), groups(episodes)
    for same in _equal_observations(episodes, grouped.values()):
        if len(same) < 2:
            continue
        values = np.array([returns[i][t] for i, t in same])
        divisor = values.std(ddof=1) + SCALE_EPSILON if scale == "group" else 1.0
        for (i, t), value in zip(same, above(values, values.mean()) / divisor, strict=True):
            advantages[i][t] += step_advantage_weight * value
    return advantages if scale == "group" else divide_by_rms(advantages, grouped.values(), scale)


def gagpo(
    episodes: Sequence[Episode], *, gamma: float = 1.0, lam: float = 0.95, scale: Scale = "batch"
) -> list[Array]:
    """Give each step its generalised advantage, with means over equal observations as values.

    GAGPO (Zhu et al., 2026, arXiv 2605.13217): ``d_t = r_t + gamma V(o_{t+1}) - V(o_t)``,
    ``A_t = d_t + gamma lam A_{t+1}``. ``V(o)`` is the mean return-to-go of all steps of the group
    that saw the observation, and 0 after the last step; so ``d_t = 0`` between two observations
    that were seen once. `scale` is that of `grpo_step`.
    """
    returns, grouped = returns_to_go(episodes, gamma), groups(episodes)
    values = [np.zeros(len(each) + 1) for each in returns]
    for same in _equal_observations(episodes, grouped.values()):
        mean = np.mean([returns[i][t] for i, t in same])
        for i, t in same:
            values[i][t] = mean
    for i in (i for members in grouped.values() for i in members):
        targets = np.asarray(episodes[i].rewards, float) + gamma * values[i][1:]
        returns[i] = discount(above(targets, values[i][:-1]), gamma * lam)
    return divide_by_rms(returns, grouped.values(), scale)


def max_rl(episodes: Sequence[Episode]) -> list[Array]:
    """Give every step ``(R - mean) / mean`` with the binary return R of its episode.

    MaxRL (arXiv 2602.02710): with growing groups the expected gradient approaches that of the
    logarithm of the success rate. 0 in a group without success.

    Raises:
        ConfigurationError: If a return is neither 0 nor 1.
    """
    advantages = dr_grpo(episodes)
    for group, members in groups(episodes).items():
        totals = np.array([sum(episodes[i].rewards) for i in members])
        if not np.all(is_rounding(totals, 0.0) | is_rounding(totals - 1.0, 1.0)):
            raise ConfigurationError(
                f"max_rl needs returns of 0 or 1, but group {group!r} has {totals.tolist()}. Keep "
                "the outcome reward alone (env_kwargs: rewards), or use another estimator."
            )
        for i in members:
            advantages[i] /= max(totals.mean(), 1.0 / len(members))
    return advantages


def gdpo(episodes: Sequence[Episode], *, weights: Mapping[str, float] | None = None) -> list[Array]:
    """Normalise each reward term in its group, then weight, add up, and normalise in the batch.

    GDPO (Liu et al., 2026, arXiv 2601.05242): ``A_i = sum_k w_k (R_ik - mean_k) / (std_k + 1e-4)``
    with ``R_ik`` the sum of term k over the episode; then less the mean and divided by the standard
    deviation of the batch plus 1e-4, as TRL's ``normalize_then_sum``. Every step of an episode gets
    the same. `weights` are by term, 1 where not given: the scale of a term itself has no effect.
    """
    scored = [i for members in groups(episodes).values() for i in members]
    totals = np.zeros(len(episodes))
    for name in sorted(
        {name for i in scored for terms in episodes[i].reward_terms for name in terms}
    ):
        sums = [sum(t.get(name, 0.0) for t in episode.reward_terms) for episode in episodes]
        totals += (weights or {}).get(name, 1.0) * _normalise(episodes, np.array(sums), "group")
    advantages = above(totals, totals[scored].mean() if scored else 0.0)
    return _at_every_step(episodes, advantages / (_std(totals[scored]) + SCALE_EPSILON))


def _normalise(episodes: Sequence[Episode], totals: Floats, scale: Scale) -> Floats:
    """Return the totals of episodes less the group's mean, divided by the deviation; (E,)."""
    check_scale(scale)
    grouped, advantages = groups(episodes), np.zeros(len(episodes))
    spread = _std(totals[[i for members in grouped.values() for i in members]])
    for members in grouped.values():
        advantages[members] = above(totals[members], totals[members].mean())
        if scale != "none":
            divisor = _std(totals[members]) if scale == "group" else spread
            advantages[members] /= divisor + SCALE_EPSILON
    return advantages


def _std(values: Floats) -> float:
    """Return the unbiased standard deviation; 0 for fewer than two values."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _at_every_step(episodes: Sequence[Episode], advantages: Floats) -> list[Array]:
    """Repeat the advantage of an episode for each step; (0,) if it is not scorable."""
    return [
        np.full(len(episode.rewards) if episode.is_scorable else 0, advantage, np.float32)
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]


def _equal_observations(
    episodes: Sequence[Episode], grouped: Iterable[Sequence[int]]
) -> list[list[tuple[int, int]]]:
    """Return the places, episode and step, of each observation of each group."""
    places: dict[tuple[int, Hashable], list[tuple[int, int]]] = {}
    for number, members in enumerate(grouped):
        for i in members:
            for t, anchor in enumerate(episodes[i].anchors):
                places.setdefault((number, anchor), []).append((i, t))
    return list(places.values())


def _token_weights(episodes: Sequence[Episode]) -> list[Sequence[int]]:
    return [episode.lengths if episode.is_scorable else [] for episode in episodes]
