"""What a batch of episodes looked like, in numbers small enough to send between processes."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_trainers.trajectory import StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """One episode without its texts and tokens; enough to assign credit and to log."""

    group_id: str
    """Episodes with the same id are compared with each other."""
    rewards: tuple[float, ...]
    """Reward of each step."""
    lengths: tuple[int, ...]
    """Number of action tokens of each step."""
    anchors: tuple[bytes, ...]
    """A digest of the observation before each step."""
    is_truncated: bool
    """Whether the episode was cut off."""
    is_scorable: bool
    """Whether the episode counts."""
    reward_terms: dict[str, float]
    """Sum of each reward term over the episode."""
    metrics: dict[str, float]
    """What the environment measured at the end."""
    stop_reason: StopReason
    """Why the episode ended."""
    error_codes: tuple[str, ...]
    """Codes of invalid actions and failed tools."""
    num_steps: int
    """Model turns."""
    num_tokens: int
    """Tokens of the last state and action: the length of the episode."""
    num_sampled_tokens: int
    """Tokens that the policy wrote."""
    timings: dict[str, float]
    """Seconds by kind of work."""


def summarise(
    trajectory: Trajectory, reward_factors: Mapping[str, float] | None = None
) -> EpisodeSummary:
    """Reduce a trajectory to its numbers.

    Args:
        trajectory: What was played.
        reward_factors: What the reward terms are multiplied with now; 1 where not named.
    """
    factors = reward_factors or {}
    terms: Counter[str] = Counter()
    codes, rewards = [], []
    for transition in trajectory.transitions:
        reward = transition.reward
        for name, value in transition.reward_terms.items():
            factor = factors.get(name, 1.0)
            terms[name] += factor * value  # type: ignore[assignment]
            reward += (factor - 1.0) * value
        rewards.append(reward)
        if code := transition.info.get("action", {}).get("error"):
            codes.append(code)
    last = trajectory.transitions[-1] if trajectory.transitions else None
    return EpisodeSummary(
        group_id=trajectory.group_id,
        rewards=tuple(rewards),
        lengths=tuple(trajectory.lengths),
        anchors=tuple(_digest(anchor) for anchor in trajectory.anchors),
        is_truncated=trajectory.is_truncated,
        is_scorable=trajectory.is_scorable,
        reward_terms=dict(terms),
        metrics=dict(trajectory.metrics),
        stop_reason=trajectory.stop_reason,
        error_codes=tuple(codes),
        num_steps=len(trajectory.transitions),
        num_tokens=len(last.prompt_ids) + len(last.completion_ids) if last else 0,
        num_sampled_tokens=sum(len(t.completion_ids) for t in trajectory.transitions),
        timings=dict(trajectory.timings),
    )


def trainer_metrics(
    episodes: Sequence[EpisodeSummary],
    advantages: Sequence[Any],
    outcome_terms: Collection[str] = (),
) -> dict[str, float]:
    """Return the metrics of a batch under the names that TRL's loggers show.

    ``reward``, ``reward_std`` and ``frac_reward_zero_std`` as in TRL; ``rewards/<term>``, and
    where `outcome_terms` are known ``reward/outcome`` and ``reward/process``, their sums;
    ``metrics/<metric>`` of the environment, and ``success`` by itself; ``episodes/<stop reason>``
    and ``actions/<error code>`` as shares; ``completions/…`` in tokens; ``time/…`` in seconds of
    the batch (generation is shared out, environments add up).
    """
    scored = [episode for episode in episodes if episode.is_scorable]
    metrics: dict[str, float] = {
        "episodes/unscorable": (len(episodes) - len(scored)) / max(1, len(episodes))
    }
    for reason in StopReason:
        count = sum(episode.stop_reason is reason for episode in episodes)
        metrics[f"episodes/{reason.value}"] = count / max(1, len(episodes))
    for name in ("generate_seconds", "environment_seconds"):
        metrics[f"time/{name}"] = sum(episode.timings.get(name, 0.0) for episode in episodes)
    if not scored:
        return metrics
    returns = [sum(episode.rewards) for episode in scored]
    metrics["reward"] = float(np.mean(returns))
    metrics["reward_std"] = float(np.std(returns))
    metrics["frac_reward_zero_std"] = _share_without_signal(episodes, advantages)
    terms = [episode.reward_terms for episode in scored]
    metrics |= {f"rewards/{name}": value for name, value in _means(terms).items()}
    if outcome_terms:
        outcomes = [sum(t.get(name, 0.0) for name in outcome_terms) for t in terms]
        metrics["reward/outcome"] = float(np.mean(outcomes))
        metrics["reward/process"] = metrics["reward"] - metrics["reward/outcome"]
    measured = _means([episode.metrics for episode in scored])
    metrics |= {f"metrics/{name}": value for name, value in measured.items()}
    if "success" in measured:
        metrics["success"] = measured["success"]
    num_steps = sum(episode.num_steps for episode in scored)
    codes = Counter(code for episode in scored for code in episode.error_codes)
    metrics |= {f"actions/{code}": count / num_steps for code, count in codes.items()}
    metrics["completions/mean_length"] = float(np.mean([e.num_sampled_tokens for e in scored]))
    metrics["completions/max_length"] = float(max(e.num_sampled_tokens for e in scored))
    metrics["episodes/mean_turns"] = num_steps / len(scored)
    return metrics


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _means(records: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for record in records for name in record})
    return {name: float(np.mean([r[name] for r in records if name in r])) for name in names}


def _share_without_signal(episodes: Sequence[EpisodeSummary], advantages: Sequence[Any]) -> float:
    """Return the share of groups in which every advantage is 0: nothing to learn from."""
    has_signal: dict[str, bool] = {}
    for episode, values in zip(episodes, advantages, strict=True):
        if episode.is_scorable:
            before = has_signal.get(episode.group_id, False)
            has_signal[episode.group_id] = before or bool(np.any(values))
    return 1.0 - sum(has_signal.values()) / len(has_signal)
