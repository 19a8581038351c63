"""Credit by role: each role of an episode is compared with the same role in its group.

An episode is split into one part for each role. A shared reward term counts for every role, at its
last step before the reward, so the return of a role's step is that of the episode from there on. A
term with an owner counts for that role alone.

An episode with roles is a dataclass with the fields of `Episode`, ``roles`` and ``reward_owners``
of shape (S,) (``""`` without roles; the role that owns a term, by its name), ``frozen_roles``,
which are not trained, and ``start``, the step at which a branch leaves its episode.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agent_trainers.algorithms.episodes import Array, Episode


def estimate_by_role(
    estimate: Callable[[Sequence[Episode]], Sequence[Array]], episodes: Sequence[Any]
) -> list[Array]:
    """Estimate the advantage of each step within its role, for a whole batch.

    Returns:
        For each episode float32 of shape (S,), 0 in the steps of frozen roles; shape (0,) where it
        is not scorable. The result of `estimate` where no episode has roles.

    Raises:
        ValueError: If `estimate` does not return one number per step.
    """
    if not any(any(episode.roles) for episode in episodes):
        return list(estimate(episodes))
    parts = [(i, part) for i, episode in enumerate(episodes) for part in take_apart(episode)]
    estimates = estimate([part for _, part in parts])
    advantages = [
        np.zeros(len(episode.rewards) if episode.is_scorable else 0, np.float32)
        for episode in episodes
    ]
    for (i, part), values in zip(parts, estimates, strict=True):
        if part.is_scorable:
            advantages[i][[name == part.roles[0] for name in episodes[i].roles]] = values
    return advantages


def take_apart(episode: Any) -> list[Any]:
    """Return a copy of an episode for each trained role, with that role's steps only."""
    parts = []
    for role in dict.fromkeys(episode.roles):
        if role in episode.frozen_roles:
            continue
        steps = [t for t, name in enumerate(episode.roles) if name == role]
        rewards, reward_terms = [0.0] * len(steps), [Counter[str]() for _ in steps]
        for t, owners in enumerate(episode.reward_owners):
            before = sum(step <= t for step in steps)  # earlier rewards are not its own
            if not before:
                continue
            terms = episode.reward_terms[t]
            own = {name: terms[name] for name in terms if owners.get(name, role) == role}
            rewards[before - 1] += episode.rewards[t] if own == terms else sum(own.values())
            for name, value in own.items():
                reward_terms[before - 1][name] += value
        parts.append(
            replace(
                episode,
                group_id=f"{episode.group_id}/{role}",
                rewards=rewards,
                reward_terms=reward_terms,
                lengths=[episode.lengths[t] for t in steps],
                anchors=[episode.anchors[t] for t in steps],
                states=[episode.states[t] for t in steps],
                roles=[role] * len(steps),
                start=sum(t < episode.start for t in steps),
            )
        )
    return parts
