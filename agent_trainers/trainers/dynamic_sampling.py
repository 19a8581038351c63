"""Batches that follow their results: dynamic sampling, and what a curriculum is told.

Dynamic sampling: groups whose members all earned the same are played anew with other tasks. Such
a group teaches nothing (Yu et al., DAPO, arXiv 2503.14476, section 3.2). Here a batch keeps its
size: an extra group takes the place of one without variance, if it has variance itself, and a
budget says how many extra groups a batch may play. What is played follows from the run's state
alone, and is the same for any number of processes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tasks.curriculum import CurriculumDraws, GroupResult
from agent_trainers.trainers.distributed import ProcessGroup
from agent_trainers.trainers.episode_plan import EpisodePlayer
from agent_trainers.trajectory import Trajectory

_SAME: Final = 1e-9  # returns that are as close are equal


class PlayedBatch(NamedTuple):
    """A batch, and what it took."""

    trajectories: list[Trajectory]
    """This process's episodes."""
    metrics: dict[str, float]
    """What is to be logged."""
    generate_seconds: float
    """Seconds in which tokens were generated, also for groups that were given up."""


class ResultFollower:
    """Plays training batches, and lets what comes next follow the results."""

    def __init__(self, player: EpisodePlayer, processes: ProcessGroup, budget: int) -> None:
        """Play by `player`, which has draws; at most `budget` extra groups a batch."""
        self._player, self._processes, self._budget = player, processes, budget

    def play(
        self,
        inputs: Sequence[Mapping[str, Any]],
        step: tuple[int, int],
        reward_factors: Mapping[str, float],
    ) -> PlayedBatch:
        """Play a batch; collective.

        Args:
            inputs: Rows, one for each episode of this process; how many there are counts.
            step: See `plan_episodes`.
            reward_factors: What reward terms are multiplied with now.
        """
        player, draws, group_size = self._player, self._player.draws, self._player.group_size
        assert draws is not None
        metrics = draws.metrics() if isinstance(draws, CurriculumDraws) else {}
        specs = player.specs(inputs, "train", step)
        counts = self._processes.all_gather(len(specs))
        first = sum(counts[: self._processes.index])
        places = [i // group_size for i in range(first, first + len(specs))]
        batch = Resampling(num_groups=-(-sum(counts) // group_size), budget=self._budget)
        trajectories = self._play(batch, specs, places, step, reward_factors)
        seconds = _generate_seconds(trajectories)
        while wanted := batch.next_places():
            numbers = batch.begin_round(wanted)
            rows = [{"env": d.env, "task": d.task} for d in draws.draw(len(numbers))]
            own = [i for i, place in enumerate(places) if place in wanted]
            extra: list[EpisodeSpec] = []
            for i in own:
                number = numbers[wanted.index(places[i])]
                row = rows[wanted.index(places[i])]
                member = (first + i) % group_size
                extra += player.plan([row], "train", step, first=number * group_size + member)
            own_numbers = [numbers[wanted.index(places[i])] for i in own]
            again = self._play(batch, extra, own_numbers, step, reward_factors)
            taken = batch.end_round(wanted, numbers)
            seconds += _generate_seconds(again)
            for i, trajectory in zip(own, again, strict=True):
                if places[i] in taken:
                    trajectories[i] = trajectory
        metrics |= batch.metrics()
        if isinstance(draws, CurriculumDraws):
            results = [batch.results[number] for number in sorted(batch.results)]
            draws.note([result for result in results if not math.isnan(result.success)])
        return PlayedBatch(trajectories, metrics, seconds)

    def _play(
        self,
        batch: "Resampling",
        specs: Sequence[EpisodeSpec],
        numbers: Sequence[int],
        step: tuple[int, int],
        reward_factors: Mapping[str, float],
    ) -> list[Trajectory]:
        """Play this process's episodes, and tell all processes what came of them.

        Their branches begin where others have got to, so they tell nothing of a task.
        """
        trajectories = self._player.play_specs(specs, "train", step, reward_factors)
        episodes = [trajectory for trajectory in trajectories if not trajectory.start]
        own = episode_results(specs, numbers, episodes, reward_factors)
        batch.results |= group_results(self._processes.all_gather_objects(own))
        return trajectories


class EpisodeResult(NamedTuple):
    """What one process tells the others of an episode."""

    number: int
    """Number of its group; extra groups come after those of the batch."""
    env: str
    task: int
    success: float
    return_: float
    is_scorable: bool


@dataclass(kw_only=True)
class Resampling:
    """The groups of a batch while some of them are played anew; the same in every process."""

    num_groups: int
    """Groups of the batch."""
    budget: int
    """Extra groups that may still be played."""
    results: dict[int, GroupResult] = field(default_factory=dict)
    """What came of each group, by number, those that were given up too."""
    in_place: list[int] = field(default_factory=list)
    """The number of the group that each place of the batch holds now."""
    num_extra: int = 0
    """Extra groups that were played."""

    def __post_init__(self) -> None:
        """Put each group in its own place."""
        self.in_place = list(range(self.num_groups))

    def next_places(self) -> list[int]:
        """Return the places to play anew, as many as the budget allows."""
        places = [
            place
            for place, number in enumerate(self.in_place)
            if not self.results[number].has_variance
        ]
        return places[: self.budget]

    def begin_round(self, places: Sequence[int]) -> list[int]:
        """Return the numbers of the extra groups that are played for `places`."""
        first = self.num_groups + self.num_extra
        self.num_extra += len(places)
        self.budget -= len(places)
        return list(range(first, first + len(places)))

    def end_round(self, places: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """Let extra groups with variance take their places; return these places."""
        taken = []
        for place, number in zip(places, numbers, strict=True):
            if self.results[number].has_variance:
                self.in_place[place] = number
                taken.append(place)
        return taken

    def metrics(self) -> dict[str, float]:
        """Return what is to be logged: of all groups that were played, not of those kept alone."""
        played = list(self.results.values())
        known = [group.success for group in played if not math.isnan(group.success)]
        return {
            "groups/extra": float(self.num_extra),
            "groups/played_success": float(np.mean(known or [0.0])),
            "groups/played_without_variance": float(
                np.mean([not group.has_variance for group in played])
            ),
        }


def episode_results(
    specs: Sequence[EpisodeSpec],
    numbers: Sequence[int],
    trajectories: Sequence[Trajectory],
    reward_factors: Mapping[str, float],
) -> list[EpisodeResult]:
    """Return what came of episodes, whose groups have `numbers`."""
    results = []
    for spec, number, trajectory in zip(specs, numbers, trajectories, strict=True):
        summary = summarise(trajectory, reward_factors)
        earned = float(sum(summary.rewards))
        success = summary.success if "success" in summary.metrics else earned > 0
        results.append(
            EpisodeResult(
                number=number,
                env=spec.env,
                task=-1 if spec.task is None else spec.task,
                success=float(success),
                return_=earned,
                is_scorable=summary.is_scorable,
            )
        )
    return results


def group_results(episodes: Sequence[EpisodeResult]) -> dict[int, GroupResult]:
    """Return what came of each group, by number."""
    groups: dict[int, list[EpisodeResult]] = {}
    for episode in episodes:
        groups.setdefault(episode.number, []).append(episode)
    results = {}
    for number, members in sorted(groups.items()):
        scored = [member for member in members if member.is_scorable]
        returns = [member.return_ for member in scored]
        results[number] = GroupResult(
            env=members[0].env,
            task=members[0].task,
            success=float(np.mean([member.success for member in scored])) if scored else math.nan,
            has_variance=bool(returns) and max(returns) - min(returns) > _SAME,
        )
    return results


def _generate_seconds(trajectories: Sequence[Trajectory]) -> float:
    return sum(trajectory.timings["generate_seconds"] for trajectory in trajectories)
