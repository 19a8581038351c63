"""Credit: from the rewards of a batch of episodes to advantages per step or per token.

Estimators are pure functions of a batch of episodes, with options by name; those with a critic also
take ``values`` (see ``gae.py``). An unscorable episode is left out of its group and every mean.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms import group_estimators
from agent_trainers.algorithms.episodes import Array, Episode
from agent_trainers.algorithms.gae import gae_bilevel, gae_step, gae_token

Estimator = Callable[..., Sequence[Array]]

ADVANTAGE_ESTIMATORS: Final[Mapping[str, Estimator]] = {
    function.__name__: function
    for function in (
        group_estimators.grpo,
        group_estimators.grpo_step,
        group_estimators.dr_grpo,
        group_estimators.rloo,
        group_estimators.reinforce_pp,
        group_estimators.reinforce_pp_baseline,
        group_estimators.gigpo,
        group_estimators.gagpo,
        group_estimators.max_rl,
        group_estimators.gdpo,
        gae_token,
        gae_step,
        gae_bilevel,
    )
}


def estimate(
    estimator: str | Estimator, trajectories: Sequence[Episode], **options: Any
) -> list[Array]:
    """Estimate the advantages of a whole batch of episodes, over all processes.

    Args:
        estimator: A key of `ADVANTAGE_ESTIMATORS`, the import path of another
            (``"my_module:my_estimator"``), or the function itself.
        trajectories: `Trajectory` objects, or anything else that fits `Episode`.
        options: Options of the estimator, by name: see `estimator_options`.

    Returns:
        For each episode, in order, float32 of shape (S,), one per step, or (N,), one per value
        given, for `gae_token` and `gae_bilevel`; shape (0,) for an unscorable episode.

    Raises:
        UnknownNameError: If there is no such estimator.
        TypeError: If it has no such option.
        ConfigurationError: If values do not fit the episodes, or it returns another number of
            arrays than there are episodes, or no finite numbers.
    """
    function = find_estimator(estimator)
    name = estimator if isinstance(estimator, str) else getattr(function, "__name__", "estimator")
    advantages = list(function(trajectories, **options))
    if len(advantages) != len(trajectories):
        raise ConfigurationError(
            f"{name} returned {len(advantages)} arrays for {len(trajectories)} "
            "episodes. Return one per episode, an empty one where it is not scorable."
        )
    for i, values in enumerate(advantages):
        if not np.all(np.isfinite(values)):
            raise ConfigurationError(
                f"{name} returned a number that is not finite for episode {i} of "
                f"{len(trajectories)}, with the rewards {list(trajectories[i].rewards)}. Return 0 "
                "for a step without information."
            )
    return advantages


def find_estimator(estimator: str | Estimator) -> Estimator:
    """Return the estimator of a name or import path, or the given one; refuse unknown names."""
    if callable(estimator):
        return estimator
    return lookup_or_import(ADVANTAGE_ESTIMATORS, estimator, kind="advantage estimator")


def estimator_options(estimator: str | Estimator) -> tuple[str, ...]:
    """Return the names of an estimator's options."""
    return tuple(inspect.signature(find_estimator(estimator)).parameters)[1:]


def needs_values(estimator: str | Estimator) -> bool:
    """Return whether an estimator needs a critic."""
    return "values" in estimator_options(estimator)
