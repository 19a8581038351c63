"""Rollouts of a trainer: the episodes of a batch with their seeds, and dynamic sampling.

Everything follows from the run's state and is the same for any number of processes.

Dynamic sampling (Yu et al., DAPO, arXiv 2503.14476, section 3.2) replaces groups whose members all
have the same return, as they give no gradient, by groups of other tasks. The batch keeps its size,
and a budget limits the number of extra groups.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agent_trainers.algorithms.episodes import is_rounding
from agent_trainers.batching.distributed import ProcessGroup
from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.rollout.collector import Collector
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tasks.samplers import GroupResult, TaskSampler
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trajectory import Trajectory


class CollectedBatch(NamedTuple):
    """This process's episodes of a batch."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    """Metrics of the sampler and of dynamic sampling."""
    generate_seconds: float
    """Seconds of generation, those of replaced groups included."""


class TrainerRollouts:
    """Collects this process's episodes of training and evaluation batches."""

    def __init__(
        self,
        args: StepGRPOConfig,
        processes: ProcessGroup,
        group_sizes: Mapping[str, int],
        collectors: Mapping[str, Collector],
        *,
        sampler: TaskSampler | None = None,
        env_names: Sequence[str] = (),
        extensions: Sequence[Extension] = (),
    ) -> None:
        """Collect groups of the given sizes with the given collectors, both by mode.

        A `sampler` chooses the tasks of training instead of the rows of the dataset. `env_names`
        are the names of all environments, where rows have them.
        """
        self._args, self._processes, self._group_sizes = args, processes, group_sizes
        self.collectors = dict(collectors)
        self._sampler, self._env_names, self._extensions = sampler, list(env_names), extensions
        self._is_followed = bool(args.max_extra_groups or args.curriculum)

    def close(self) -> None:
        """Close the idle environments."""
        for collector in self.collectors.values():
            collector.close()

    def collect(
        self,
        inputs: Sequence[Mapping[str, Any]],
        mode: str,
        step: tuple[int, int],
        reward_factors: Mapping[str, float] | None = None,
    ) -> CollectedBatch:
        """Collect one episode per row of the dataset; collective.

        Args:
            inputs: This process's rows; with a sampler only their number counts.
            mode: ``"train"`` or ``"eval"``.
            step: Optimiser step, and micro-batch in it.
            reward_factors: Current factor of each scheduled reward term.
        """
        factors, size = reward_factors or {}, self._group_sizes[mode]
        counts = self._processes.all_gather(len(inputs))
        first = sum(counts[: self._processes.index])
        metrics: dict[str, float] = {}
        if mode == "train" and self._sampler is not None:
            metrics = self._sampler.metrics()
            drawn = self._sampler.draw(-(-sum(counts) // size))
            tasks = [drawn[i // size] for i in range(first, first + len(inputs))]
            inputs = [{"env": each.env, "task": each.task} for each in tasks]
        specs = self._specs(inputs, range(first, first + len(inputs)), mode, step)
        trajectories = self._collect(specs, mode, step, factors)
        seconds = _generate_seconds(trajectories)
        if mode == "train" and self._is_followed:
            places = [i // size for i in range(first, first + len(inputs))]
            results = self._results(specs, places, trajectories, factors)
            extra = self._resample(trajectories, results, places, first, step, factors)
            metrics |= extra.metrics
            seconds += extra.generate_seconds
            assert self._sampler is not None
            scored = [results[number] for number in sorted(results)]
            self._sampler.observe([r for r in scored if not math.isnan(r.success)])
        return CollectedBatch(trajectories, metrics, seconds)

    def _collect(
        self,
        specs: Sequence[EpisodeSpec],
        mode: str,
        step: tuple[int, int],
        factors: Mapping[str, float],
    ) -> list[Trajectory]:
        for extension in self._extensions if mode == "train" else ():
            if (trajectories := extension.collect(specs, step, factors)) is not None:
                return trajectories
        return self.collectors[mode].collect(specs)

    def _specs(
        self,
        rows: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        mode: str,
        step: tuple[int, int],
    ) -> list[EpisodeSpec]:
        size, seed, names = self._group_sizes[mode], self._args.seed, self._env_names
        return [
            episode_spec(row, number, mode, size, seed, step, names)
            for row, number in zip(rows, numbers, strict=True)
        ]

    def _resample(
        self,
        trajectories: list[Trajectory],
        results: dict[int, GroupResult],
        places: Sequence[int],
        first: int,
        step: tuple[int, int],
        factors: Mapping[str, float],
    ) -> CollectedBatch:
        """Replace groups without variance in `trajectories`, and add to `results`.

        `places` are the groups of this process's episodes; `first` is the number of its first one.
        """
        size, budget = self._group_sizes["train"], self._args.max_extra_groups
        num_groups, num_extra, seconds = len(results), 0, 0.0
        held = dict(enumerate(sorted(results)))  # the group that each place of the batch holds
        while wanted := [p for p in held if not results[held[p]].has_variance][:budget]:
            numbers = {place: num_groups + num_extra + i for i, place in enumerate(wanted)}
            budget, num_extra = budget - len(wanted), num_extra + len(wanted)
            assert self._sampler is not None
            tasks = dict(zip(wanted, self._sampler.draw(len(wanted)), strict=True))
            own = [i for i, place in enumerate(places) if place in tasks]
            rows = [tasks[places[i]]._asdict() for i in own]
            episodes = [numbers[places[i]] * size + (first + i) % size for i in own]
            specs = self._specs(rows, episodes, "train", step)
            extra = self._collect(specs, "train", step, factors)
            results |= self._results(specs, [numbers[places[i]] for i in own], extra, factors)
            held |= {p: number for p, number in numbers.items() if results[number].has_variance}
            seconds += _generate_seconds(extra)
            for i, trajectory in zip(own, extra, strict=True):
                if held[places[i]] == numbers[places[i]]:
                    trajectories[i] = trajectory
        success = [r.success for r in results.values() if not math.isnan(r.success)]
        metrics = {
            "groups/extra": float(num_extra),
            "groups/played_success": float(np.mean(success or [0.0])),
            "groups/played_without_variance": float(
                np.mean([not result.has_variance for result in results.values()])
            ),
        }
        return CollectedBatch(trajectories, metrics, seconds)

    def _results(
        self,
        specs: Sequence[EpisodeSpec],
        numbers: Sequence[int],
        trajectories: Sequence[Trajectory],
        factors: Mapping[str, float],
    ) -> dict[int, GroupResult]:
        """Return the outcome of each group of all processes, by number; collective."""
        own = []
        episodes = [trajectory for trajectory in trajectories if not trajectory.start]
        for spec, number, trajectory in zip(specs, numbers, episodes, strict=True):
            summary = summarise(trajectory, factors)
            return_ = float(sum(summary.rewards))
            success = summary.success if "success" in summary.metrics else return_ > 0
            task = -1 if spec.task is None else spec.task
            own.append((number, spec.env, task, float(success), return_, summary.is_scorable))
        groups: dict[int, list[tuple[int, str, int, float, float, bool]]] = {}
        for episode in self._processes.all_gather_objects(own):
            groups.setdefault(episode[0], []).append(episode)
        results = {}
        for number, members in sorted(groups.items()):
            scored = [member for member in members if member[5]]
            returns = [member[4] for member in scored] or [0.0]
            results[number] = GroupResult(
                env=members[0][1],
                task=members[0][2],
                success=float(np.mean([member[3] for member in scored])) if scored else math.nan,
                has_variance=not is_rounding(max(returns) - min(returns), 0.0),
            )
        return results


def episode_spec(
    row: Mapping[str, Any],
    number: int,
    mode: str,
    group_size: int,
    seed: int,
    step: tuple[int, int],
    env_names: Sequence[str] = (),
) -> EpisodeSpec:
    """Return the spec of an episode of a batch.

    Seeds depend on the place in the run, not on the process, so any number of processes runs the
    same episodes, and a resumed run continues with those of the unbroken run.

    Args:
        row: ``task``, and the name ``env`` where there are several environments.
        number: Number of the episode in the batch of all processes; its group has `group_size`.
        mode: ``"train"`` or ``"eval"``.
        group_size: Episodes of a group.
        seed: The seed of the run.
        step: Optimiser step, and micro-batch in it.
        env_names: The names of all environments, where there are several.
    """
    is_training = mode == "train"
    place = step if is_training else (0, 0)
    task, env = int(row["task"]), row.get("env", "")
    group, member = divmod(number, group_size)
    # In training a task may come twice in a batch; in evaluation every task is new.
    key = group if is_training else task
    # The first environment has the seeds of a run with one environment.
    others = (place_of,) if env and (place_of := env_names.index(env)) else ()
    suffix = f"{key}-{env}" if env else f"{group}"
    seeds = np.random.SeedSequence([seed, is_training, *place, task, *others])
    return EpisodeSpec(
        task=task,
        seed=int(seeds.generate_state(1)[0]),
        group_id=f"{mode}-{place[0]}-{place[1]}-{suffix}",
        rng=np.random.default_rng([seed, is_training, *place, key, member, *others]),
        env=env,
    )


def _generate_seconds(trajectories: Sequence[Trajectory]) -> float:
    return sum(trajectory.timings["generate_seconds"] for trajectory in trajectories)
