"""Advantages with a critic: generalised advantage estimation over steps, tokens, or both.

An estimator takes ``values[i][t][j]``, the value of episode i before token j of step t. The first
of a step is the value of the step's state. A step may also have values of the observation tokens
after its action: then these take part in the recursion of `gae_token`, which is PPO without the
advantage mask of Agent-R1 (arXiv 2511.14460).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms import episodes as shared
from agent_trainers.algorithms.episodes import Array, Episode, Floats, discount

Values = Sequence[Sequence[Any]]


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
    episode terminated and the bootstrap value, shape (E,), where it was truncated. `values` may
    also be a number per step, ``values[i][t]``. Value targets are ``A + V`` without `whiten`.
    """

    def credit(episode: Episode, steps: list[Floats], last: float) -> Floats:
        return _gae(episode.rewards, np.array([step[0] for step in steps]), last, gamma, lam)

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

    The recursion runs over the tokens that have values; action tokens alone form the compact
    timeline of Agent-R1 (arXiv 2511.14460). A step's reward comes with its last action token. The
    arguments are those of `gae_step`, per token.
    """

    def credit(episode: Episode, steps: list[Floats], last: float) -> Floats:
        _check_tokens(episode, steps)
        rewards = [np.zeros(len(step)) for step in steps]
        for t, reward in enumerate(episode.rewards):
            rewards[t][episode.lengths[t] - 1] = reward
        return _gae(np.concatenate(rewards), np.concatenate(steps), last, gamma, lam)

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
    over the step's own tokens, with `token_gamma` and `token_lam`. Values are of action tokens
    only; the other arguments are those of `gae_step`, and tokens are whitened.
    """

    def credit(episode: Episode, steps: list[Floats], last: float) -> Floats:
        _check_tokens(episode, steps, only_actions=True)
        baseline = np.array([step[0] for step in steps])
        returns = _gae(episode.rewards, baseline, last, gamma, lam) + baseline
        tokens = []
        for step, return_ in zip(steps, returns, strict=True):
            rewards = np.zeros(len(step))
            rewards[-1] = return_
            tokens.append(_gae(rewards, step, 0.0, token_gamma, token_lam))
        return np.concatenate(tokens)

    return _with_values(episodes, values, bootstrap_values, credit, whiten)


def _with_values(
    episodes: Sequence[Episode],
    values: Values,
    bootstrap_values: Sequence[float] | None,
    credit: Callable[[Episode, list[Floats], float], Floats],
    whitens: bool,
) -> list[Array]:
    advantages = []
    ends = [0.0] * len(episodes) if bootstrap_values is None else bootstrap_values
    for i, (episode, last) in enumerate(zip(episodes, ends, strict=True)):
        if not episode.is_scorable:
            advantages.append(np.zeros(0, np.float32))
            continue
        if len(values[i]) != len(episode.rewards):
            raise ConfigurationError(
                f"values[{i}] has {len(values[i])} entries for {len(episode.rewards)} steps."
            )
        steps = [np.atleast_1d(np.asarray(step, float)) for step in values[i]]
        last = float(last) if episode.is_truncated else 0.0
        advantages.append(credit(episode, steps, last).astype(np.float32))
    return shared.whiten(advantages) if whitens else advantages


def _gae(rewards: npt.ArrayLike, values: Floats, last: float, gamma: float, lam: float) -> Floats:
    """Return generalised advantages, same shape as `values`; `last` is the value after the end."""
    deltas = np.asarray(rewards, float) + gamma * np.append(values[1:], last) - values
    return discount(deltas, gamma * lam)


def _check_tokens(episode: Episode, steps: Sequence[Floats], *, only_actions: bool = False) -> None:
    for t, (step, length) in enumerate(zip(steps, episode.lengths, strict=True)):
        if len(step) < max(1, length) or (only_actions and len(step) > length):
            raise ConfigurationError(
                f"Step {t} has {length} action tokens and {len(step)} values: there must be one "
                "for each action token."
            )
