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
    tool_names: tuple[str, ...]
    """Name of the tool of each call."""
    tool_errors: tuple[str, ...]
    """Codes of the calls that failed."""
    tool_seconds: tuple[float, ...]
    """Seconds that the steps with a call took; empty where nobody measured."""
    context_drops: tuple[str, ...]
    """For each state that left something out, the context policy that did."""
    num_dropped_messages: int
    """Messages that states left out, over all states."""
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
    names, errors, seconds = _tool_calls(trajectory)
    contexts = [t.info["context"] for t in trajectory.transitions[:-1] if t.info.get("context")]
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
        tool_names=names,
        tool_errors=errors,
        tool_seconds=seconds,
        context_drops=tuple(str(c.get("reason", "")).split(":")[0] for c in contexts),
        num_dropped_messages=sum(c.get("num_dropped", 0) for c in contexts),
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

    ``reward``, ``reward_std`` and ``frac_reward_zero_std`` as in TRL; ``success``;
    ``rewards/<term>`` per episode and ``rewards_per_step/<term>`` per step, and where
    `outcome_terms` are known ``reward/outcome`` and ``reward/process``, their sums;
    ``metrics/<metric>`` of the environment; ``episodes/<stop reason>`` and ``actions/<error code>``
    as shares; ``tools/…`` with calls, failures and latencies; ``context/…``, what states left out;
    ``groups/without_variance``, the share of groups whose members all earned the same;
    ``completions/…`` in tokens; ``time/…`` in seconds of the batch (generation is shared out,
    environments add up).
    """
    scored = [episode for episode in episodes if episode.is_scorable]
    metrics = _endings(episodes, len(scored))
    if not scored:
        return metrics
    returns = [sum(episode.rewards) for episode in scored]
    metrics["reward"] = float(np.mean(returns))
    metrics["reward_std"] = float(np.std(returns))
    metrics["frac_reward_zero_std"] = _share_without_signal(episodes, advantages)
    metrics["groups/without_variance"] = _share_without_variance(scored)
    measured = _means([episode.metrics for episode in scored])
    metrics |= {f"metrics/{name}": value for name, value in measured.items()}
    if "success" in measured:
        metrics["success"] = measured["success"]
    metrics |= _reward_terms(scored, metrics["reward"], outcome_terms)
    metrics |= _actions(scored)
    metrics |= _tools(scored)
    metrics["completions/mean_length"] = float(np.mean([e.num_sampled_tokens for e in scored]))
    metrics["completions/max_length"] = float(max(e.num_sampled_tokens for e in scored))
    metrics["episodes/mean_turns"] = float(np.mean([e.num_steps for e in scored]))
    metrics["episodes/max_turns"] = float(max(e.num_steps for e in scored))
    return metrics


def _endings(episodes: Sequence[EpisodeSummary], num_scored: int) -> dict[str, float]:
    """Return how the episodes ended, and the seconds they took."""
    num_episodes = max(1, len(episodes))
    metrics = {"episodes/unscorable": (len(episodes) - num_scored) / num_episodes}
    for reason in StopReason:
        count = sum(episode.stop_reason is reason for episode in episodes)
        metrics[f"episodes/{reason.value}"] = count / num_episodes
    for name in ("generate_seconds", "environment_seconds"):
        metrics[f"time/{name}"] = sum(episode.timings.get(name, 0.0) for episode in episodes)
    return metrics


def _reward_terms(
    scored: Sequence[EpisodeSummary], reward: float, outcome_terms: Collection[str]
) -> dict[str, float]:
    terms = [episode.reward_terms for episode in scored]
    num_steps = _num_steps(scored)
    metrics = {f"rewards/{name}": value for name, value in _means(terms).items()}
    for name in sorted({name for record in terms for name in record}):
        total = sum(record.get(name, 0.0) for record in terms)
        metrics[f"rewards_per_step/{name}"] = total / num_steps
    if outcome_terms:
        outcomes = [sum(t.get(name, 0.0) for name in outcome_terms) for t in terms]
        metrics["reward/outcome"] = float(np.mean(outcomes))
        metrics["reward/process"] = reward - metrics["reward/outcome"]
    return metrics


def _actions(scored: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return shares of steps: mistakes by code, and states that left something out by policy."""
    num_steps = _num_steps(scored)
    codes = Counter(code for episode in scored for code in episode.error_codes)
    metrics = {f"actions/{code}": count / num_steps for code, count in codes.items()}
    num_tool_errors = sum(len(episode.tool_errors) for episode in scored)
    metrics["actions/invalid"] = (codes.total() - num_tool_errors) / num_steps
    drops = Counter(policy for episode in scored for policy in episode.context_drops)
    metrics["context/drops"] = drops.total() / num_steps
    metrics |= {f"context/{policy}": count / num_steps for policy, count in drops.items()}
    dropped = sum(episode.num_dropped_messages for episode in scored)
    metrics["context/dropped_messages"] = dropped / num_steps
    return metrics


def _tools(scored: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return calls per episode, by tool too, failures as shares of calls, and seconds of a call."""
    calls = Counter(name for episode in scored for name in episode.tool_names)
    metrics = {"tools/calls": calls.total() / len(scored)}
    if not calls:
        return metrics
    metrics |= {f"tools/calls/{name}": count / len(scored) for name, count in calls.items()}
    errors = Counter(code for episode in scored for code in episode.tool_errors)
    metrics["tools/failures"] = errors.total() / calls.total()
    metrics |= {f"tools/{code}": count / calls.total() for code, count in errors.items()}
    if seconds := [value for episode in scored for value in episode.tool_seconds]:
        metrics["tools/seconds_mean"] = float(np.mean(seconds))
        metrics["tools/seconds_p95"] = float(np.quantile(seconds, 0.95))
        metrics["tools/seconds_max"] = max(seconds)
    return metrics


def _num_steps(scored: Sequence[EpisodeSummary]) -> int:
    return max(1, sum(episode.num_steps for episode in scored))


def _tool_calls(
    trajectory: Trajectory,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[float, ...]]:
    """Return the names of the tools called, codes of the calls that failed, and their seconds."""
    actions = [transition.info.get("action") or {} for transition in trajectory.transitions]
    calls = [t for t, action in enumerate(actions) if action.get("kind") == "tool_call"]
    seconds = trajectory.step_seconds
    return (
        tuple(str(actions[t].get("name")) for t in calls),
        tuple(str(actions[t]["error"]) for t in calls if actions[t].get("error")),
        tuple(seconds[t] for t in calls if t < len(seconds)),
    )


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


def _share_without_variance(scored: Sequence[EpisodeSummary]) -> float:
    """Return the share of groups of two or more whose members all earned the same; 0 of none."""
    returns: dict[str, list[float]] = {}
    for episode in scored:
        returns.setdefault(episode.group_id, []).append(sum(episode.rewards))
    spreads = [max(values) - min(values) for values in returns.values() if len(values) > 1]
    return sum(spread <= 1e-9 for spread in spreads) / max(1, len(spreads))
