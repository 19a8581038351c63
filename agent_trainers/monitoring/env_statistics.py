"""What a run reports of each of several environments: in a batch, and in an evaluation."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from agent_trainers.monitoring.episode_statistics import EpisodeSummary, trainer_metrics

REPORTED: Final = (
    "success", "reward", "reward_std", "frac_reward_zero_std", "groups/without_variance",
    "episodes/unscorable", "episodes/mean_turns", "completions/mean_length", "actions/invalid",
    "rewards/", "metrics/",
)  # fmt: skip
"""Of what a whole batch reports, by name or its beginning, what is reported of each environment."""


def env_metrics(
    episodes: Sequence[EpisodeSummary], advantages: Sequence[Any], names: Sequence[str]
) -> dict[str, float]:
    """Return ``env/<name>/<metric>`` of each environment that was played, and of all its share.

    Args:
        episodes: Those of a batch.
        advantages: Theirs.
        names: The environments that are played.
    """
    metrics = {}
    for name in names:
        own = [i for i, episode in enumerate(episodes) if episode.env == name]
        metrics[f"env/{name}/share"] = len(own) / max(1, len(episodes))
        if own:
            found = trainer_metrics([episodes[i] for i in own], [advantages[i] for i in own])
            metrics |= {f"env/{name}/{k}": v for k, v in found.items() if k.startswith(REPORTED)}
    return metrics


class EvaluatedEnvironments:
    """Collects the episodes of an evaluation of several environments, batch after batch."""

    def __init__(
        self, names: Sequence[str], variants: Collection[str], samples_per_task: int
    ) -> None:
        """Collect of environments of these names, of which nothing is trained in `variants`."""
        self.names, self.variants = names, variants
        self._samples_per_task = samples_per_task
        self.clear()

    def clear(self) -> None:
        """Begin another evaluation."""
        self._episodes: list[EpisodeSummary] = []
        self._advantages: list[Any] = []
        self._num_played: Counter[tuple[str, str]] = Counter()

    def add(
        self,
        episodes: Sequence[EpisodeSummary],
        advantages: Sequence[Any],
        outcome_terms: Collection[str],
    ) -> dict[str, float]:
        """Take in a batch; return the metrics of all that was evaluated so far.

        Those of all environments that are trained in are called as if there were but one; of each
        environment there are ``env/<name>/...``, and of each that is not trained in
        ``env/<name>/of_in_domain``, its success over that of those that are.
        """
        for episode, values in zip(episodes, advantages, strict=True):
            # Accelerate plays the first tasks again to fill the last batch: they count once.
            self._num_played[episode.env, episode.task_id] += 1
            if self._num_played[episode.env, episode.task_id] <= self._samples_per_task:
                self._episodes.append(episode)
                self._advantages.append(values)
        own = [i for i, e in enumerate(self._episodes) if e.env not in self.variants]
        metrics = env_metrics(self._episodes, self._advantages, self.names)
        if own:
            in_domain = [self._episodes[i] for i in own]
            advantages = [self._advantages[i] for i in own]
            metrics |= trainer_metrics(in_domain, advantages, outcome_terms)
        for name in self.variants:
            if metrics.get("success") and f"env/{name}/success" in metrics:
                metrics[f"env/{name}/of_in_domain"] = (
                    metrics[f"env/{name}/success"] / metrics["success"]
                )
        return metrics
