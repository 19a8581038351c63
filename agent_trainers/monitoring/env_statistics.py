"""What a run reports of each of several environments: in a batch, and in an evaluation."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

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


class SuccessCurve(NamedTuple):
    """How success in one environment went over a run."""

    name: str
    """The environment."""
    is_evaluated: bool
    """Whether it is of evaluations, not of training batches."""
    is_trained: bool
    """Whether something is trained in it."""
    points: list[tuple[int, float]]
    """Optimiser steps, and success at them."""


def success_curves(
    history: Sequence[Mapping[str, Any]], figures: Mapping[str, Mapping[str, Any]]
) -> list[SuccessCurve]:
    """Return the curves of several environments, those of training first; none of one alone.

    Args:
        history: The trainer's log.
        figures: ``by_environment`` of ``results.json``, as far as it is known.
    """
    if not figures:
        return []
    last = max((entry["step"] for entry in history), default=0)
    trained = [name for name, own in figures.items() if own["is_trained"]]
    variants = [name for name in figures if name not in trained]
    curves = [
        SuccessCurve(name, False, True, _points(history, f"env/{name}/success")) for name in trained
    ]
    for name in [*trained, *variants]:
        own = figures[name]
        points = _points(history, f"eval_env/{name}/success")
        ends = ((0, own.get("success_before")), (last, own.get("success_after")))
        known = dict(points) | {step: value for step, value in ends if value is not None}
        curves.append(SuccessCurve(name, True, name in trained, sorted(known.items())))
    return [curve for curve in curves if curve.points]


def _points(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in history if entry.get(name) is not None]
