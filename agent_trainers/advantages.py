"""Credit: from the rewards of a batch of episodes to one advantage per step.

Pure functions of rewards; no model, no tensors of tokens. Episodes that could not be scored are
left out of their group and get no advantages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import lookup

Array = npt.NDArray[np.float32]
Scale = Literal["group", "batch", "none"]

STD_EPSILON: Final = 1e-4
"""Added to the standard deviation, as TRL does."""


class Rewarded(Protocol):
    """What an estimator needs to know of an episode; a `Trajectory` fits."""

    @property
    def group_id(self) -> str:
        """Episodes with the same id are compared with each other."""

    @property
    def rewards(self) -> Sequence[float]:
        """Reward of each step, shape (S,)."""

    @property
    def is_scorable(self) -> bool:
        """Whether the episode counts."""


AdvantageEstimator = Callable[..., list[Array]]


def estimate(
    name: str, episodes: Sequence[Rewarded], *, gamma: float = 1.0, scale: Scale = "group"
) -> list[Array]:
    """Estimate one advantage per step of each episode.

    Args:
        name: A key of `ADVANTAGE_ESTIMATORS`.
        episodes: The whole batch, over all processes.
        gamma: Discount per step, in [0, 1].
        scale: Divide by the standard deviation of the ``group``, of the ``batch``, or not at all.

    Returns:
        For each episode, in order, advantages of shape (S,), float32; shape (0,) where the
        episode could not be scored.

    Raises:
        UnknownNameError: If there is no such estimator.
    """
    return lookup(ADVANTAGE_ESTIMATORS, name, kind="advantage estimator")(
        episodes, gamma=gamma, scale=scale
    )


def grpo(episodes: Sequence[Rewarded], *, gamma: float, scale: Scale) -> list[Array]:
    """Give every step of an episode its group-normalised return.

    ``A_i = (R_i - mean) / (std + 1e-4)`` over the group of the same task (Shao et al., 2024, arXiv
    2402.03300, section 4.1.2), with ``R_i`` the discounted return of the episode.
    """
    returns = [_returns_to_go(episode.rewards, gamma)[:1] for episode in episodes]
    advantages = _normalise(episodes, returns, scale)
    return [
        np.repeat(advantage, len(episode.rewards)) if len(advantage) else advantage
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]


def grpo_step(episodes: Sequence[Rewarded], *, gamma: float, scale: Scale) -> list[Array]:
    """Give each step its group-normalised return-to-go.

    ``A_{i,t} = (G_{i,t} - mean) / (std + 1e-4)`` with ``G_{i,t} = sum_{k>=t} gamma^(k-t) r_{i,k}``.
    Mean and variance are taken over all steps of the group, each episode with the same weight
    whatever its length, so that neither long episodes nor a step's number shift the baseline. Where
    all reward comes at the end and ``gamma`` is 1, this is `grpo`.
    """
    returns = [_returns_to_go(episode.rewards, gamma) for episode in episodes]
    return _normalise(episodes, returns, scale)


ADVANTAGE_ESTIMATORS: Final[Mapping[str, AdvantageEstimator]] = {
    "grpo": grpo,
    "grpo_step": grpo_step,
}


def _returns_to_go(rewards: Sequence[float], gamma: float) -> npt.NDArray[np.float64]:
    """Return ``G_t = r_t + gamma * G_{t+1}``, shape (S,)."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = returns[t] = rewards[t] + gamma * following
    return returns


def _normalise(
    episodes: Sequence[Rewarded], values: Sequence[npt.NDArray[np.float64]], scale: Scale
) -> list[Array]:
    """Subtract the group's mean from each episode's values and divide by the standard deviation."""
    groups: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        if episode.is_scorable and len(values[i]):
            groups.setdefault(episode.group_id, []).append(i)
    batch = [i for members in groups.values() for i in members]
    advantages = [np.zeros(0, np.float32) for _ in episodes]
    for members in groups.values():
        mean = np.mean([values[i].mean() for i in members])
        divisor = 1.0
        if scale != "none":
            divisor = _std([values[i] for i in (members if scale == "group" else batch)])
            divisor += STD_EPSILON
        for i in members:
            advantages[i] = ((values[i] - mean) / divisor).astype(np.float32)
    return advantages


def _std(values: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return the unbiased standard deviation, each episode weighing the same; 0 for a singleton."""
    if len(values) < 2:
        return 0.0
    mean = np.mean([v.mean() for v in values])
    squares = sum(float(np.mean((v - mean) ** 2)) for v in values)
    return float(np.sqrt(squares / (len(values) - 1)))
