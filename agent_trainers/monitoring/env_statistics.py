"""Metrics of each of several environments, in a batch and in an evaluation."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from agent_trainers.monitoring.episode_statistics import EpisodeSummary, trainer_metrics

REPORTED: Final = (
    "success", "reward", "reward_std", "frac_reward_zero_std", "groups/without_variance",
    "episodes/unscorable", "episodes/mean_turns", "completions/mean_length", "actions/invalid",
    "rewards/", "metrics/",
)  # fmt: skip
"""Names, or prefixes, of the metrics of a batch that each environment reports, too."""


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
        self._episodes: list[EpisodeSummary] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(
        self, episodes: Sequence[EpisodeSummary], outcome_terms: Collection[str]
    ) -> dict[str, float]:
        """Add a batch; return the metrics of the evaluation so far.

        The metrics of all trained environments have their usual names; each environment has
        ``env/<name>/...``, and each variant ``env/<name>/of_in_domain``, its success relative to
        that of the trained ones.
        """
        for episode in episodes:
            # Accelerate repeats the first tasks to fill the last batch: they count once
            self._counts[episode.env, episode.task_id] += 1
            if self._counts[episode.env, episode.task_id] <= self._samples_per_task:
                self._episodes.append(episode)
        metrics = env_metrics(self._episodes, self.names)
        if in_domain := [e for e in self._episodes if e.env not in self.variants]:
            metrics |= trainer_metrics(in_domain, outcome_terms)
        for name in self.variants:
            if metrics.get("success") and f"env/{name}/success" in metrics:
                relative = metrics[f"env/{name}/success"] / metrics["success"]
                metrics[f"env/{name}/of_in_domain"] = relative
        return metrics
