"""What is scored: every estimator of the package, with and without a critic, and anybody's own."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate,
    find_estimator,
    needs_values,
    uses_branches,
)
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode

ALGORITHMS: Final[Mapping[str, str]] = {
    "reinforce_pp": "reinforce++",
    "reinforce_pp_baseline": "reinforce++-baseline",
    "gae_token": "ppo",
    "gae_step": "step_ppo",
    "gae_bilevel": "bilevel_ppo",
}
"""What an estimator is trained by, where the algorithm has another name."""
_LOWER: Final[Mapping[str, Mapping[str, float]]] = {
    "gae_step": {"lam": 0.9},
    "gae_token": {"lam": 0.98},
    "gae_bilevel": {"lam": 0.9},
}
"""A second row for estimators that trust their critic more the lower lambda is."""


class Row(NamedTuple):
    """A row of the table."""

    name: str
    estimator: str
    critic: str = ""
    """``critic``: values of one that was fitted; ``no critic``: all values 0; else empty."""
    options: Mapping[str, Any] = {}


def rows_of(estimators: Sequence[str]) -> list[Row]:
    """Return the rows of estimators, by name or import path.

    Raises:
        UnknownNameError: If there is no such estimator.
    """
    rows = []
    for name in estimators:
        find_estimator(name)
        if not needs_values(name):
            rows.append(Row(name, name))
            continue
        rows.append(Row(f"{name}, no critic", name, "no critic"))
        rows.append(Row(f"{name}, critic", name, "critic"))
        if options := _LOWER.get(name):
            told = ", ".join(f"{option} {value}" for option, value in options.items())
            rows.append(Row(f"{name}, critic, {told}", name, "critic", options))
    return rows


def all_estimators(own: Sequence[str] = ()) -> list[str]:
    """Return the names of the package's estimators, then import paths of others."""
    return [*ADVANTAGE_ESTIMATORS, *own]


def estimates_of(row: Row, batch: CreditBatch) -> list[np.ndarray[Any, Any]] | None:
    """Return an advantage for each step of a batch's episodes, branches left out, (S,) each.

    None where the row needs a critic's values and the batch has none. What an estimator says of
    tokens is averaged over those of each step.

    Raises:
        ConfigurationError: If the estimator returns what fits neither steps nor tokens.
    """
    measured = [episode for episode in batch.episodes if episode.start == 0]
    episodes = batch.episodes if uses_branches(row.estimator) else measured
    options = dict(row.options)
    if row.critic == "critic":
        if not all(episode.values for episode in measured):
            return None
        options["values"] = [episode.values for episode in episodes]
    elif row.critic:
        options["values"] = [[[0.0] * length for length in e.lengths] for e in episodes]
    everything = estimate(row.estimator, episodes, **options)
    return [
        _per_step(row, advantages, episode)
        for advantages, episode in zip(everything, episodes, strict=True)
        if episode.start == 0
    ]


def _per_step(row: Row, advantages: Any, episode: CreditEpisode) -> np.ndarray[Any, Any]:
    values = np.asarray(advantages, float)
    if len(values) == len(episode.rewards):
        return values
    if len(values) != sum(episode.lengths):
        raise ConfigurationError(
            f"{row.estimator} returned {len(values)} advantages for an episode of "
            f"{len(episode.rewards)} steps and {sum(episode.lengths)} tokens. Return one per step, "
            "or one per token."
        )
    bounds = np.cumsum([0, *episode.lengths[:-1]])
    means: np.ndarray[Any, Any] = np.add.reduceat(values, bounds) / np.array(episode.lengths)
    return means
