"""Episodes as numbers, small enough to send between processes, and what is computed from them.

That is the metrics of a batch, of each of several environments, and of failures outside the model.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.scoring.statistics import krippendorff_alpha
from agent_trainers.algorithms.episodes import is_rounding
from agent_trainers.algorithms.roles import take_apart
from agent_trainers.rollout.evaluation import means
from agent_trainers.trajectory import StopReason, TaskKey, Trajectory

REPORTED: Final = (
    "success", "reward", "reward_std", "frac_reward_zero_std", "groups/without_variance",
    "episodes/unscorable", "episodes/mean_turns", "completions/mean_length", "actions/invalid",
    "rewards/", "metrics/",
)  # fmt: skip
"""Names, or prefixes, of the metrics of a batch that each environment reports, too."""
EPISODE_FAULTS: Final[Mapping[StopReason, str]] = {
    StopReason.ENVIRONMENT_ERROR: "environment_error",  # an exception or an invalid reward
    StopReason.TIMEOUT: "environment_timeout",
    StopReason.POLICY_ERROR: "policy_error",
}
TOOL_FAULTS: Final = ("tool_error", "tool_timeout")
MAX_BATCHES: Final = 3
"""Consecutive batches in which most episodes may fail, so that a server can restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """An episode without texts and tokens; enough for credit assignment and logging."""

    task_key: TaskKey
    group_id: str
    rewards: tuple[float, ...]
    """Reward of each step."""
    lengths: tuple[int, ...]
    """Number of action tokens of each step."""
    anchors: tuple[bytes, ...]
    """Digest of the observation before each step."""
    states: tuple[str, ...]
    """Digest of the history before each step."""
    is_truncated: bool
    is_scorable: bool
    reward_terms: tuple[Mapping[str, float], ...]
    """Reward terms of each step by name."""
    metrics: dict[str, float]
    """Metrics of the environment at the end."""
    stop_reason: StopReason
    error: str | None
    step_counts: Mapping[str, int]
    """Number of steps with an error or a shortened state, by the name of the metric."""
    tool_calls: Mapping[str, int]
    """Number of calls by tool."""
    tool_errors: Mapping[str, int]
    """Number of failed calls by error code."""
    num_cut_results: int
    """Number of tool results that were cut."""
    tool_seconds: list[float]
    """Seconds of each step with a call; empty if not measured."""
    num_tokens: int
    """Tokens of the last state and action: the length of the episode."""
    timings: dict[str, float]
    """Seconds by kind of work."""
    start: int = 0
    """First step not shared with the episode that this one branched off."""
    roles: tuple[str, ...] = ()
    """Role of each step; ``""`` without roles."""
    reward_owners: tuple[Mapping[str, str], ...] = ()
    """Role that owns a reward term, by its name, for each step; all share the others."""
    frozen_roles: frozenset[str] = frozenset()
    """Roles that are not trained."""
    env: str = ""
    """Name of the environment if there are several."""
    judgements: tuple[Mapping[str, Any], ...] = ()
    """Judgements of each step, by name."""
    has_signal: bool = False
    """Whether any advantage is not 0."""

    @property
    def num_steps(self) -> int:
        """Number of model turns."""
        return len(self.rewards)

    @property
    def success(self) -> bool:
        """Whether the environment counts the episode as a success."""
        return self.metrics.get("success", 0.0) > 0.0

    @property
    def term_sums(self) -> dict[str, float]:
        """Sum of each reward term over the episode."""
        return _sum(self.reward_terms)


def summarise(
    trajectory: Trajectory, reward_factors: Mapping[str, float] | None = None
) -> EpisodeSummary:
    """Return the numbers of a trajectory; its reward terms are multiplied by `reward_factors`."""
    factors = reward_factors or {}
    rewards = trajectory.rewards
    for t, terms in enumerate(trajectory.reward_terms):
        rewards[t] += sum((factors.get(name, 1.0) - 1.0) * value for name, value in terms.items())
    actions = [transition.info.get("action") or {} for transition in trajectory.transitions]
    # a turn may contain several calls; its seconds are those of all
    with_calls = [t for t, action in enumerate(actions) if action.get("kind") == "tool_call"]
    each = [call for t in with_calls for call in actions[t].get("calls") or [actions[t]]]
    calls = [call for call in each if call.get("kind") == "tool_call"]
    num_timed = len(trajectory.step_seconds)
    last = trajectory.transitions[-1] if trajectory.transitions else None
    return EpisodeSummary(
        task_key=trajectory.task_key,
        group_id=trajectory.group_id,
        rewards=tuple(rewards),
        lengths=tuple(trajectory.lengths),
        anchors=tuple(
            hashlib.blake2b(anchor.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            for anchor in trajectory.anchors
        ),
        states=tuple(trajectory.states),
        is_truncated=trajectory.is_truncated,
        is_scorable=trajectory.is_scorable,
        reward_terms=tuple(
            {name: factors.get(name, 1.0) * value for name, value in terms.items()}
            for terms in trajectory.reward_terms
        ),
        metrics=dict(trajectory.metrics),
        stop_reason=trajectory.stop_reason,
        error=trajectory.error,
        step_counts=_step_counts(trajectory, actions),
        tool_calls=Counter(str(call.get("name")) for call in calls),
        tool_errors=Counter(call["error"] for call in calls if call.get("error")),
        num_cut_results=sum(bool(call.get("num_cut_chars")) for call in each),
        tool_seconds=[trajectory.step_seconds[t] for t in with_calls if t < num_timed],
        num_tokens=len(last.prompt_ids) + len(last.completion_ids) if last else 0,
        timings=dict(trajectory.timings),
        start=trajectory.start,
        roles=tuple(t.role for t in trajectory.transitions),
        reward_owners=tuple(t.info.get("reward_owners", {}) for t in trajectory.transitions),
        frozen_roles=frozenset(t.role for t in trajectory.transitions if t.is_frozen),
        env=trajectory.env,
        judgements=tuple(t.info.get("judgements", {}) for t in trajectory.transitions),
    )


def _step_counts(trajectory: Trajectory, actions: Sequence[Mapping[str, Any]]) -> Counter[str]:
    counts = Counter({"actions/invalid": 0, "context/drops": 0, "context/dropped_messages": 0})
    for action in actions:
        if code := action.get("error"):
            counts[f"actions/{code}"] += 1
            counts["actions/invalid"] += action.get("kind") != "tool_call"
        counts["context/summaries"] += action.get("kind") == "summary"
    for transition in trajectory.transitions[:-1]:  # the state after the last step is not used
        context = transition.info.get("context") or {}
        if reason := context.get("reason"):
            counts["context/drops"] += 1
            counts[f"context/{reason.split(':')[0]}"] += 1
            counts["context/dropped_messages"] += context.get("num_dropped", 0)
    return counts


def trainer_metrics(
    episodes: Sequence[EpisodeSummary], outcome_terms: Collection[str] = ()
) -> dict[str, float]:
    """Return the metrics of a batch by the names in the documentation of monitoring.

    Branches count in ``branches/...`` only. With `outcome_terms`, the return is also split into
    ``reward/outcome`` and ``reward/process``.
    """
    metrics = _branches([episode for episode in episodes if episode.start])
    episodes = [episode for episode in episodes if not episode.start]
    scored = [episode for episode in episodes if episode.is_scorable]
    metrics |= _endings(episodes, len(scored))
    if not scored:
        return metrics
    returns = [sum(episode.rewards) for episode in scored]
    metrics["reward"] = float(np.mean(returns))
    metrics["reward_std"] = float(np.std(returns))
    metrics["frac_reward_zero_std"] = _share_without_signal(scored)
    metrics["groups/without_variance"] = _share_without_variance(scored)
    measured = means([episode.metrics for episode in scored])
    metrics |= {f"metrics/{name}": value for name, value in measured.items()}
    if "success" in measured:
        metrics["success"] = measured["success"]
    terms = [episode.term_sums for episode in scored]
    num_steps = max(1, sum(episode.num_steps for episode in scored))
    metrics |= {f"rewards/{name}": value for name, value in means(terms).items()}
    metrics |= {f"rewards_per_step/{name}": sum_ / num_steps for name, sum_ in _sum(terms).items()}
    if outcome_terms:
        outcomes = [sum(t.get(name, 0.0) for name in outcome_terms) for t in terms]
        metrics["reward/outcome"] = float(np.mean(outcomes))
        metrics["reward/process"] = metrics["reward"] - metrics["reward/outcome"]
    counts = _sum(episode.step_counts for episode in scored)
    metrics |= {name: count / num_steps for name, count in counts.items()}
    metrics |= _tools(scored)
    metrics |= _roles(scored)
    metrics |= _judges([steps for episode in scored for steps in episode.judgements])
    lengths = [sum(episode.lengths) for episode in scored]
    metrics["completions/mean_length"] = float(np.mean(lengths))
    metrics["completions/max_length"] = float(max(lengths))
    metrics["episodes/mean_turns"] = float(np.mean([e.num_steps for e in scored]))
    metrics["episodes/max_turns"] = float(max(e.num_steps for e in scored))
    return metrics


def _branches(branches: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return number and cost of branches; nothing without any."""
    if not branches:
        return {}
    return {
        "branches/count": float(len(branches)),
        "branches/unscorable": sum(not b.is_scorable for b in branches) / len(branches),
        "branches/environment_steps": float(sum(b.num_steps - b.start for b in branches)),
        "branches/completion_tokens": float(sum(sum(b.lengths[b.start :]) for b in branches)),
    }


def _endings(episodes: Sequence[EpisodeSummary], num_scored: int) -> dict[str, float]:
    """Return the share of each stop reason, and the seconds of all episodes."""
    num_episodes = max(1, len(episodes))
    metrics = {"episodes/unscorable": (len(episodes) - num_scored) / num_episodes}
    for reason in StopReason:
        count = sum(episode.stop_reason is reason for episode in episodes)
        metrics[f"episodes/{reason.value}"] = count / num_episodes
    for name in ("generate_seconds", "environment_seconds"):
        metrics[f"time/{name}"] = sum(episode.timings.get(name, 0.0) for episode in episodes)
    return metrics


def _tools(scored: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return calls per episode, failures as shares of calls, and seconds of a call."""
    calls = _sum(episode.tool_calls for episode in scored)
    num_calls = sum(calls.values())
    metrics = {"tools/calls": num_calls / len(scored)}
    if not calls:
        return metrics
    metrics |= {f"tools/calls/{name}": count / len(scored) for name, count in calls.items()}
    errors = _sum(episode.tool_errors for episode in scored)
    metrics["tools/failures"] = sum(errors.values()) / num_calls
    metrics |= {f"tools/{code}": count / num_calls for code, count in errors.items()}
    if seconds := [value for episode in scored for value in episode.tool_seconds]:
        metrics["tools/seconds_mean"] = float(np.mean(seconds))
        metrics["tools/seconds_p95"] = float(np.quantile(seconds, 0.95))
        metrics["tools/seconds_max"] = max(seconds)
    return metrics


def _judges(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return tokens and cost of judges, and their agreement about each criterion."""
    metrics = {}
    for name in sorted({name for step in steps for name in step}):
        own = [step[name] for step in steps if name in step]
        for used in ("tokens", "cost"):
            metrics[f"judges/{name}/{used}"] = float(sum(each[used] for each in own))
        for criterion in own[0]["scores"][0] if len(own[0]["scores"]) > 1 else ():
            units = ([scores[criterion] for scores in each["scores"]] for each in own)
            metrics[f"judges/{name}/alpha/{criterion}"] = krippendorff_alpha(units)
    return metrics


def _roles(scored: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return the mean return, turns and tokens of each role, over the episodes with it."""
    parts = [
        (part.group_id.rpartition("/")[2], part)
        for episode in scored
        if any(episode.roles)
        for part in take_apart(replace(episode, frozen_roles=frozenset()))
    ]
    metrics = {}
    for role in sorted({role for role, _ in parts}):
        own = [part for name, part in parts if name == role]
        for name, values in (
            ("return", [sum(part.rewards) for part in own]),
            ("mean_turns", [len(part.rewards) for part in own]),
            ("mean_length", [sum(part.lengths) for part in own]),
        ):
            metrics[f"roles/{role or 'other'}/{name}"] = float(np.mean(values))
    return metrics


def _sum(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            total[name] = total.get(name, 0) + value
    return total


def _share_without_signal(scored: Sequence[EpisodeSummary]) -> float:
    """Return the share of groups in which every advantage is 0."""
    with_signal = {episode.group_id for episode in scored if episode.has_signal}
    return 1.0 - len(with_signal) / len({episode.group_id for episode in scored})


def _share_without_variance(scored: Sequence[EpisodeSummary]) -> float:
    """Return the share of groups of two or more with equal returns; 0 without such groups."""
    returns: dict[str, list[float]] = {}
    for episode in scored:
        returns.setdefault(episode.group_id, []).append(sum(episode.rewards))
    spreads = [max(values) - min(values) for values in returns.values() if len(values) > 1]
    return float(np.sum(is_rounding(spreads, 0.0))) / max(1, len(spreads))


def env_metrics(episodes: Sequence[EpisodeSummary], names: Sequence[str]) -> dict[str, float]:
    """Return ``env/<name>/<metric>`` of each environment in a batch, and the share of each."""
    metrics = {}
    for name in names:
        own = [episode for episode in episodes if episode.env == name]
        metrics[f"env/{name}/share"] = len(own) / max(1, len(episodes))
        found = trainer_metrics(own) if own else {}
        metrics |= {f"env/{name}/{k}": v for k, v in found.items() if k.startswith(REPORTED)}
    return metrics


class EvaluatedEnvironments:
    """Collects an evaluation of several environments over its batches."""

    def __init__(
        self, names: Sequence[str], variants: Collection[str], samples_per_task: int
    ) -> None:
        """Collect the environments `names`; `variants` are for evaluation only."""
        self.names, self.variants = names, variants
        self._samples_per_task = samples_per_task
        self.clear()

    def clear(self) -> None:
        """Start another evaluation."""
        self.episodes: list[EpisodeSummary] = []
        """Those of all processes; repeated tasks count once."""
        self._counts: Counter[TaskKey] = Counter()

    def add(
        self, episodes: Sequence[EpisodeSummary], outcome_terms: Collection[str]
    ) -> dict[str, float]:
        """Add a batch; return the metrics of the evaluation so far.

        The metrics of all trained environments have their usual names; each environment has
        ``env/<name>/...``.
        """
        for episode in episodes:
            # Accelerate repeats the first tasks to fill the last batch: they count once
            self._counts[episode.task_key] += 1
            if self._counts[episode.task_key] <= self._samples_per_task:
                self.episodes.append(episode)
        metrics = env_metrics(self.episodes, self.names)
        if in_domain := [e for e in self.episodes if e.env not in self.variants]:
            metrics |= trainer_metrics(in_domain, outcome_terms)
        return metrics


def count_faults(episodes: Iterable[EpisodeSummary]) -> dict[str, float]:
    """Return ``faults/<kind>``: the number of failed episodes and tool calls by kind."""
    kinds = (*EPISODE_FAULTS.values(), *TOOL_FAULTS, "tool_result_cut")
    counts = Counter(dict.fromkeys(kinds, 0))
    for episode in episodes:
        if fault := EPISODE_FAULTS.get(episode.stop_reason):
            counts[fault] += 1
        for name in TOOL_FAULTS:
            counts[name] += episode.tool_errors.get(name, 0)
        counts["tool_result_cut"] += episode.num_cut_results
    return {f"faults/{kind}": float(counts[kind]) for kind in kinds}


class FaultWatch:
    """Ends a run in which most episodes fail."""

    def __init__(self, max_share: float | None) -> None:
        """Accept up to this share of failed episodes in a batch; None accepts all."""
        self._max_share = max_share
        self._num_batches: Counter[str] = Counter()

    def check(self, mode: str, episodes: Sequence[EpisodeSummary]) -> None:
        """Check a batch of all processes; ``"train"`` and ``"eval"`` are counted separately.

        Raises:
            RolloutError: If all failed, or most in `MAX_BATCHES` consecutive batches.
            ConfigurationError: If no first state of a batch left room for a turn.
        """
        overflow = StopReason.CONTEXT_OVERFLOW
        if episodes and all(e.stop_reason is overflow and not e.rewards for e in episodes):
            raise ConfigurationError(
                "No episode of a batch has a step, because the first states are longer than "
                "max_prompt_length and the model's context allow. Raise it, or shorten the prompts."
            )
        failed = [episode for episode in episodes if episode.stop_reason in EPISODE_FAULTS]
        if self._max_share is None or len(failed) <= self._max_share * len(episodes):
            self._num_batches[mode] = 0
            return
        self._num_batches[mode] += 1
        if len(failed) < len(episodes) and self._num_batches[mode] < MAX_BATCHES:
            return
        kinds = Counter(EPISODE_FAULTS[episode.stop_reason] for episode in failed)
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        first = next((e.error for e in failed if e.error), "no error was recorded")
        raise RolloutError(
            f"{len(failed)} of {len(episodes)} episodes failed because of errors outside the model "
            f"({counts}). The first error:\n\n{first.rstrip()}\n\nFix it and resume from the last "
            "checkpoint with --resume; max_fault_share sets the share that may fail."
        )
