"""Losses as functions of tensors: clipped policy gradient, KL divergence, clipped value loss.

They are per token. Token weights sum to 1 over the whole batch, all processes and micro-batches, so
the loss does not depend on how rows are split, merged, padded and distributed.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from agent_envs.core.lookup import lookup_or_import

RATIO_LEVELS: Final = ("token", "step", "product", "sequence")
IMPORTANCE_MODES: Final = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class PolicyLoss(NamedTuple):
    """Loss of each token, and where the ratio was clipped; each of shape (B, T)."""

    loss: torch.Tensor
    """Unweighted, float."""
    is_clipped_low: torch.Tensor
    """Clipped tokens with a negative advantage, bool."""
    is_clipped_high: torch.Tensor
    """Clipped tokens with a positive advantage, bool."""


def importance_log_ratio(
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    steps: torch.Tensor,
    trajectory_lengths: torch.Tensor,
    level: str,
) -> torch.Tensor:
    """Return the logarithm of the importance ratio that each token is weighed with.

    ``token``: its own (PPO, GRPO). ``step``: the mean over its step's tokens, which is the
    geometric mean of ratios (StepPPO). ``product``: the sum over its step's tokens, the ratio of
    the whole step (Turn-PPO). ``sequence``: the mean over its trajectory's tokens (GSPO, arXiv
    2507.18071); tokens in other rows of the trajectory count as unchanged.

    Args:
        log_ratio: New less old log-probability, (B, T), float.
        mask: 1 where a token is trained, (B, T).
        steps: Number of each token's step in its row, from 0, (B, T), int64.
        trajectory_lengths: Trained tokens of the row's trajectory, (B,).
        level: One of `RATIO_LEVELS`.

    Returns:
        Shape (B, T).
    """
    if level == "token":
        return log_ratio
    masked = log_ratio * mask
    if level == "sequence":
        mean = masked.sum(dim=1) / trajectory_lengths.clamp(min=1)
        return mean[:, None].expand_as(log_ratio)
    num_steps = int(steps.max()) + 1
    sums = log_ratio.new_zeros(log_ratio.size(0), num_steps).scatter_add(1, steps, masked)
    if level == "step":
        counts = torch.zeros_like(sums).scatter_add(1, steps, mask.to(sums.dtype))
        sums = sums / counts.clamp(min=1)
    return sums.gather(1, steps)


def sampling_ratio(
    log_ratio: torch.Tensor,
    trajectories: torch.Tensor,
    mode: str,
    *,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """Return the weight that corrects for sampling with other weights or another engine, (B, T).

    It is the ratio of a token, or with ``sequence_*`` the product over its trajectory; out of
    bounds it is clipped (``*_truncate``) or 0 (``*_mask``), as in TRL. verl calls the modes
    ``rollout_is`` and ``rollout_rs``, of level ``token`` or ``sequence``.

    Args:
        log_ratio: Log-probability in the trainer less that at sampling, (B, T); 0 where not
            trained.
        trajectories: Number of each row's trajectory, (B,), int64.
        mode: One of `IMPORTANCE_MODES`.
        low: Smallest ratio; None for no bound.
        high: Largest ratio; None for no bound.
    """
    if mode.startswith("sequence"):
        sums = log_ratio.new_zeros(int(trajectories.max()) + 1)
        sums.index_add_(0, trajectories, log_ratio.sum(dim=1))
        log_ratio = sums[trajectories][:, None].expand_as(log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(min=low or 0.0, max=high)
    return clipped if mode.endswith("truncate") else ratio.masked_fill(ratio != clipped, 0.0)


def policy_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> PolicyLoss:
    """Return ``-min(r A, clip(r, 1 - low, 1 + high) A)`` (Schulman et al., 2017, arXiv 1707.06347).

    `delta` bounds the ratio where the advantage is negative, as in TRL. Tensors are (B, T).
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return PolicyLoss(
        -torch.min(bounded * advantages, clipped * advantages),
        (ratio < 1 - epsilon_low) & (advantages < 0),
        (ratio > 1 + epsilon_high) & (advantages > 0),
    )


def cispo_loss(
    log_ratio: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon_high: float,
) -> PolicyLoss:
    """Return ``-min(r, high) A log pi`` with no gradient through the ratio (arXiv 2506.13585)."""
    ratio = log_ratio.exp()
    return PolicyLoss(
        -ratio.clamp(max=epsilon_high).detach() * advantages * logprobs,
        torch.zeros_like(ratio, dtype=torch.bool),
        (ratio > epsilon_high) & (advantages > 0),
    )


PolicyLossFunction = Callable[..., PolicyLoss | torch.Tensor]

POLICY_LOSSES: Final[Mapping[str, PolicyLossFunction]] = {"dapo": policy_loss, "cispo": cispo_loss}


def find_policy_loss(name: str) -> PolicyLossFunction:
    """Return the policy loss of a name or an import path."""
    return lookup_or_import(POLICY_LOSSES, name, kind="loss_type")


def evaluate_policy_loss(loss: PolicyLossFunction, **arguments: Any) -> PolicyLoss:
    """Apply a policy loss, built in or a user's own, to those of `arguments` that it takes.

    A loss returns a `PolicyLoss`, or just the loss of each token, (B, T), unweighted.
    """
    taken = inspect.signature(loss).parameters
    result = loss(**{name: value for name, value in arguments.items() if name in taken})
    if isinstance(result, PolicyLoss):
        return result
    nowhere = torch.zeros_like(result, dtype=torch.bool)
    return PolicyLoss(result, nowhere, nowhere)


def kl_divergence(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the low-variance estimate ``exp(d) - d - 1`` with ``d = log ref - log pi``, (B, T).

    "k3" of http://joschu.net/blog/kl-approx.html; never negative.
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """Return the clipped squared error of each value, shape (B, T).

    ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``, as in OpenAI's PPO.
    """
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.max((values - targets) ** 2, (clipped - targets) ** 2)
