"""Metrics of each of several environments, in a batch and in an evaluation."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from agent_trainers.monitoring.episode_statistics import EpisodeSummary, trainer_metrics

REPORTED: Final = (
    "success", "reward", "reward_std", "frac_reward_zero_std", "groups/without_variance",
    "episodes/unscorable", "episodes/mean_turns", "completions/mean_length", "actions/invalid",
    "rewards/", "metrics/",
)  # fmt: skip
"""Names, or prefixes, of the metrics of a batch that each environment reports, too."""


def env_metrics(
    episodes: Sequence[EpisodeSummary], advantages: Sequence[Any], names: Sequence[str]
) -> dict[str, float]:
    """Return ``env/<name>/<metric>`` of each environment in a batch, and the share of each."""
    metrics = {}
    for name in names:
        own = [i for i, episode in enumerate(episodes) if episode.env == name]
        metrics[f"env/{name}/share"] = len(own) / max(1, len(episodes))
        if own:
            found = trainer_metrics([episodes[i] for i in own], [advantages[i] for i in own])
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
        self._advantages: list[Any] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(
        self,
        episodes: Sequence[EpisodeSummary],
        advantages: Sequence[Any],
        outcome_terms: Collection[str],
    ) -> dict[str, float]:
        """Add a batch; return the metrics of the evaluation so far.

        The metrics of all trained environments have their usual names; each environment has
        ``env/<name>/...``, and each variant ``env/<name>/of_in_domain``, its success relative to
        that of the trained ones.
        """
        for episode, values in zip(episodes, advantages, strict=True):
            # Accelerate repeats the first tasks to fill the last batch: they count once
            self._counts[episode.env, episode.task_id] += 1
            if self._counts[episode.env, episode.task_id] <= self._samples_per_task:
                self._episodes.append(episode)
                self._advantages.append(values)
        metrics = env_metrics(self._episodes, self._advantages, self.names)
        pairs = zip(self._episodes, self._advantages, strict=True)
        if own := [(e, values) for e, values in pairs if e.env not in self.variants]:
            in_domain, own_advantages = zip(*own, strict=True)
            metrics |= trainer_metrics(in_domain, own_advantages, outcome_terms)
        for name in self.variants:
            if metrics.get("success") and f"env/{name}/success" in metrics:
                metrics[f"env/{name}/of_in_domain"] = (
                    metrics[f"env/{name}/success"] / metrics["success"]
                )
        return metrics
