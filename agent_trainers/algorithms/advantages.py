"""Credit: from the rewards of a batch of episodes to advantages per step or per token.

Pure functions of numbers; no model, no tensors. An estimator returns one array per episode: of
shape (S,), one advantage per step, or for the token-level ones of shape (N,), one per token. An
episode that could not be scored is left out of its group and of every mean, and gets shape (0,).

Estimators with a critic take ``values[i][t][j]``, the value of episode i's state before token j of
step t. The first of a step is the value of the step's state. A step's values may go on over the
observation tokens that follow its action: then these take part in the recursion of `gae_token`,
which is PPO without the advantage mask of Agent-R1 (arXiv 2511.14460).
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Scale = Literal["group", "batch", "none"]
Values = Sequence[Sequence[Any]]

STD_EPSILON: Final = 1e-4
"""Added to a group's standard deviation, as TRL does."""
WHITEN_EPSILON: Final = 1e-8
"""Added to the variance when a whole batch is whitened."""


class Episode(Protocol):
    """What an estimator needs to know of an episode; a `Trajectory` fits."""

    @property
    def group_id(self) -> str:
        """Episodes with the same id are compared with each other."""

    @property
    def rewards(self) -> Sequence[float]:
        """Reward of each step, shape (S,)."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of action tokens of each step, shape (S,)."""

    @property
    def anchors(self) -> Sequence[Hashable]:
        """What was observed before each step, shape (S,); equal where the observations are."""

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was cut off, so that its last state still has a value."""

    @property
    def is_scorable(self) -> bool:
        """Whether the episode counts."""


Estimator = Callable[..., list[Array]]


def estimate(name: str, trajectories: Sequence[Episode], **options: Any) -> list[Array]:
    """Estimate the advantages of a whole batch of episodes, over all processes.

    Args:
        name: A key of `ADVANTAGE_ESTIMATORS`.
        trajectories: `Trajectory` objects, or anything else that fits `Episode`.
        options: Options of the estimator, by name: see `estimator_options`.

    Returns:
        For each episode, in order, float32 of shape (S,), one per step, or (N,), one per value
        given, for `gae_token` and `gae_bilevel`; shape (0,) where it could not be scored.

    Raises:
        UnknownNameError: If there is no such estimator.
        ConfigurationError: If it has no such option, or values do not fit the episodes.
    """
    function = lookup(ADVANTAGE_ESTIMATORS, name, kind="advantage estimator")
    known = estimator_options(name)
    if unknown := sorted(set(options) - set(known)):
        raise ConfigurationError(
            f"{name} has no option {', '.join(map(repr, unknown))}. Its options are: "
            f"{', '.join(known)}."
        )
    return function(trajectories, **options)


def estimator_options(name: str) -> tuple[str, ...]:
    """Return the names of an estimator's options.

    Raises:
        UnknownNameError: If there is no such estimator.
    """
    function = lookup(ADVANTAGE_ESTIMATORS, name, kind="advantage estimator")
    return tuple(inspect.signature(function).parameters)[1:]


# Without a critic


def grpo(episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group") -> list[Array]:
    """Give every step of an episode its group-normalised return.

    ``A_i = (R_i - mean) / (std + 1e-4)`` over the group of the same task (Shao et al., 2024, arXiv
    2402.03300, section 4.1.2), with ``R_i`` the discounted return of the episode. `scale` divides
    by the deviation of the ``group``, of the ``batch``, or not at all (``none``).
    """
    return _broadcast(episodes, _normalise(episodes, _first(_returns(episodes, gamma)), scale))


def grpo_step(
    episodes: Sequence[Episode], *, gamma: float = 1.0, scale: Scale = "group"
) -> list[Array]:
    """Give each step its group-normalised return-to-go.

    ``A_{i,t} = (G_{i,t} - mean) / (std + 1e-4)`` with ``G_{i,t} = sum_{k>=t} gamma^(k-t) r_{i,k}``.
    Mean and variance are taken over all steps of the group, each episode with the same weight
    whatever its length, so that neither long episodes nor a step's number shift the baseline. Where
    all reward comes at the end and ``gamma`` is 1, this is `grpo`.
    """
    return _normalise(episodes, _returns(episodes, gamma), scale)


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
    for members in _groups(episodes).values():
        for i in members:
            advantages[i] *= len(members) / max(1, len(members) - 1)
    return advantages


def reinforce_pp(episodes: Sequence[Episode], *, gamma: float = 1.0) -> list[Array]:
    """Give each step its return-to-go, whitened over the action tokens of the whole batch.

    REINFORCE++ (Hu, 2025, arXiv 2501.03262): global instead of group statistics.
    """
    returns = [values.astype(np.float32) for values in _returns(episodes, gamma)]
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
    returns = _returns(episodes, gamma)
    for members in _groups(episodes).values():
        places: dict[Hashable, list[tuple[int, int]]] = {}
        for i in members:
            for t, anchor in enumerate(episodes[i].anchors):
                places.setdefault(anchor, []).append((i, t))
        for same in places.values():
            if len(same) < 2:
                continue
            values = np.array([returns[i][t] for i, t in same])
            divisor = 1.0 if scale == "none" else values.std(ddof=1) + STD_EPSILON
            for (i, t), value in zip(same, _above(values, values.mean()) / divisor, strict=True):
                advantages[i][t] += step_advantage_weight * value
    return advantages


# With a critic


def gae_step(
    episodes: Sequence[Episode],
    *,
    values: Values,
    bootstrap_values: Sequence[float] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> list[Array]:
    """Give each step its generalised advantage, with values at step boundaries only.

    ``d_t = r_t + gamma V_{t+1} - V_t``, ``A_t = d_t + gamma lam A_{t+1}`` (Schulman et al., 2016,
    arXiv 1506.02438) with environment steps for time. ``V`` after the last step is 0 where the
    episode terminated and the bootstrap value where it was truncated. Independent of how many
    tokens a step has.

    Args:
        episodes: The batch.
        values: See the module; also ``values[i][t]``, a number per step.
        bootstrap_values: Value of each episode's state after its last step, shape (E,); 0 if not
            given. Used for truncated episodes only.
        gamma: Discount per step.
        lam: Lambda of the recursion, per step.
        whiten: Whiten over the steps of the batch. Value targets are ``A + V`` without it.
    """

    def credit(episode: Episode, steps: list[Floats], last: float) -> Floats:
        return _gae(episode.rewards, _firsts(steps), last, gamma, lam)

    return _with_values(episodes, values, bootstrap_values, credit, whiten)


def gae_token(
    episodes: Sequence[Episode],
    *,
    values: Values,
    bootstrap_values: Sequence[float] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> list[Array]:
    """Give each token its generalised advantage: PPO as for one long text.

    The recursion runs over the tokens that have values. Given for action tokens alone they form
    the compact timeline of Agent-R1, in which observation tokens neither advance nor decay
    anything (arXiv 2511.14460). A step's reward comes with its last action token.

    Args:
        episodes: The batch.
        values: See the module.
        bootstrap_values: As for `gae_step`.
        gamma: Discount per token.
        lam: Lambda of the recursion, per token.
        whiten: Whiten over the tokens of the batch.
    """

    def credit(episode: Episode, steps: list[Floats], last: float) -> Floats:
        _check_tokens(episode, steps)
        rewards = [np.zeros(len(step)) for step in steps]
        for t, reward in enumerate(episode.rewards):
            rewards[t][episode.lengths[t] - 1] = reward
        return _gae(_joined(rewards), _joined(steps), last, gamma, lam)

    return _with_values(episodes, values, bootstrap_values, credit, whiten)


def gae_bilevel(
    episodes: Sequence[Episode],
    *,
    values: Values,
    bootstrap_values: Sequence[float] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    token_gamma: float = 1.0,
    token_lam: float = 1.0,
    whiten: bool = True,
) -> list[Array]:
    """Give credit to steps first, then to the tokens inside each step.

    Bi-level GAE (VAGEN, Wang et al., 2025): `gae_step` gives each step a return
    ``Ret_t = A_t + V_t``; it becomes the reward at the end of the step, and a second recursion runs
    over the step's own tokens. Ends of steps are known, not found by looking for rewards.

    Args:
        episodes: The batch.
        values: See the module; for action tokens only.
        bootstrap_values: As for `gae_step`.
        gamma: Discount per step.
        lam: Lambda of the recursion over steps.
        token_gamma: Discount per token inside a step.
        token_lam: Lambda of the recursion over tokens.
        whiten: Whiten over the tokens of the batch.
    """

    def credit(episode: Episode, steps: list[Floats], last: float) -> Floats:
        _check_tokens(episode, steps, only_actions=True)
        baseline = _firsts(steps)
        returns = _gae(episode.rewards, baseline, last, gamma, lam) + baseline
        tokens = []
        for step, return_ in zip(steps, returns, strict=True):
            rewards = np.zeros(len(step))
            rewards[-1] = return_
            tokens.append(_gae(rewards, step, 0.0, token_gamma, token_lam))
        return _joined(tokens)

    return _with_values(episodes, values, bootstrap_values, credit, whiten)


ADVANTAGE_ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": grpo,
    "grpo_step": grpo_step,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gigpo": gigpo,
    "gae_token": gae_token,
    "gae_step": gae_step,
    "gae_bilevel": gae_bilevel,
}

TOKEN_LEVEL: Final = frozenset({"gae_token", "gae_bilevel"})
"""Estimators that give one advantage per token."""


def needs_values(name: str) -> bool:
    """Return whether an estimator needs a critic."""
    return "values" in estimator_options(name)


def whiten(arrays: Sequence[Array], weights: Sequence[npt.ArrayLike] | None = None) -> list[Array]:
    """Give a batch mean 0 and variance 1: ``(x - mean) / sqrt(variance + 1e-8)``.

    Args:
        arrays: Values of any lengths.
        weights: How often each value counts, in the same shapes; once if not given. The variance
            is the unbiased one of as many values.

    Returns:
        Arrays of the same shapes; all 0 where there is no variance.
    """
    x = _joined([np.asarray(array, float) for array in arrays])
    w = np.ones(len(x)) if weights is None else _joined([np.asarray(v, float) for v in weights])
    total = w.sum()
    if total < 2:
        return [np.zeros_like(array) for array in arrays]
    mean = (w * x).sum() / total
    variance = (w * (x - mean) ** 2).sum() / (total - 1)
    scale = 1.0 / np.sqrt(variance + WHITEN_EPSILON)
    # what is left of equal values is rounding, which the division would blow up
    is_noise = variance <= (1e-7 * max(1.0, abs(mean))) ** 2
    return [
        np.zeros_like(array) if is_noise else ((array - mean) * scale).astype(np.float32)
        for array in arrays
    ]


# Insides


def _returns(episodes: Sequence[Episode], gamma: float) -> list[Floats]:
    """Return ``G_t = r_t + gamma * G_{t+1}`` of each episode, (S,); (0,) if not scorable."""
    return [
        _discount(episode.rewards, gamma) if episode.is_scorable else np.zeros(0)
        for episode in episodes
    ]


def _discount(values: Iterable[float], factor: float) -> Floats:
    """Return ``y_t = x_t + factor * y_{t+1}``."""
    sums = np.array(list(values), float)
    for t in range(len(sums) - 2, -1, -1):
        sums[t] += factor * sums[t + 1]
    return sums


def _gae(rewards: npt.ArrayLike, values: Floats, last: float, gamma: float, lam: float) -> Floats:
    """Return generalised advantages, same shape as `values`; `last` is the value after the end."""
    deltas = np.asarray(rewards, float) + gamma * np.append(values[1:], last) - values
    return _discount(deltas, gamma * lam)


def _first(returns: Sequence[Floats]) -> list[Floats]:
    return [values[:1] for values in returns]


def _broadcast(episodes: Sequence[Episode], advantages: Sequence[Array]) -> list[Array]:
    """Give every step of an episode its one advantage."""
    return [
        np.repeat(advantage, len(episode.rewards)) if len(advantage) else advantage
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]


def _groups(episodes: Sequence[Episode]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        if episode.is_scorable and len(episode.rewards):
            groups.setdefault(episode.group_id, []).append(i)
    return groups


def _normalise(episodes: Sequence[Episode], values: Sequence[Floats], scale: Scale) -> list[Array]:
    """Subtract the group's mean from each episode's values and divide by the standard deviation."""
    groups = _groups(episodes)
    batch = [i for members in groups.values() for i in members]
    advantages = [np.zeros(0, np.float32) for _ in episodes]
    for members in groups.values():
        mean = np.mean([values[i].mean() for i in members])
        divisor = 1.0
        if scale != "none":
            divisor = _std([values[i] for i in (members if scale == "group" else batch)])
            divisor += STD_EPSILON
        for i in members:
            advantages[i] = (_above(values[i], mean) / divisor).astype(np.float32)
    return advantages


def _above(values: Floats, mean: float) -> Floats:
    """Return ``values - mean``, exactly 0 where only rounding is left."""
    difference = values - mean
    return np.where(np.abs(difference) < 1e-9 * max(1.0, abs(mean)), 0.0, difference)


def _std(values: Sequence[Floats]) -> float:
    """Return the unbiased standard deviation, each episode weighing the same; 0 for a singleton."""
    if len(values) < 2:
        return 0.0
    mean = np.mean([v.mean() for v in values])
    squares = sum(float(np.mean((v - mean) ** 2)) for v in values)
    return float(np.sqrt(squares / (len(values) - 1)))


def _token_weights(episodes: Sequence[Episode]) -> list[Sequence[int]]:
    return [episode.lengths if episode.is_scorable else [] for episode in episodes]


def _with_values(
    episodes: Sequence[Episode],
    values: Values,
    bootstrap_values: Sequence[float] | None,
    credit: Callable[[Episode, list[Floats], float], Floats],
    whitens: bool,
) -> list[Array]:
    """Apply `credit` to each episode, its values and the value after its end."""
    if bootstrap_values is None:
        bootstrap_values = [0.0] * len(episodes)
    advantages = []
    for i, (episode, last) in enumerate(zip(episodes, bootstrap_values, strict=True)):
        if not episode.is_scorable:
            advantages.append(np.zeros(0, np.float32))
            continue
        if len(values[i]) != len(episode.rewards):
            raise ConfigurationError(
                f"values[{i}] must hold one entry for each of the episode's "
                f"{len(episode.rewards)} steps; it has {len(values[i])}."
            )
        steps = [np.atleast_1d(np.asarray(step, float)) for step in values[i]]
        last = float(last) if episode.is_truncated else 0.0
        advantages.append(credit(episode, steps, last).astype(np.float32))
    return whiten(advantages) if whitens else advantages


def _check_tokens(episode: Episode, steps: Sequence[Floats], *, only_actions: bool = False) -> None:
    for t, (step, length) in enumerate(zip(steps, episode.lengths, strict=True)):
        if len(step) < max(1, length) or (only_actions and len(step) > length):
            raise ConfigurationError(
                f"Step {t} has {length} action tokens and {len(step)} values: there must be one "
                "for each action token"
                + ("." if only_actions else ", and may be more for the observation that follows.")
            )


def _firsts(steps: Sequence[Floats]) -> Floats:
    return np.array([step[0] for step in steps])


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)
