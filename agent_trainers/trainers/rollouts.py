"""Rollouts of a trainer: the episodes of a batch with their seeds, and dynamic sampling.

Everything follows from the run's state and is the same for any number of processes.

Dynamic sampling (Yu et al., DAPO, arXiv 2503.14476, section 3.2) replaces groups whose members all
have the same return, as they give no gradient, by groups of other tasks. The batch keeps its size,
and a budget limits the number of extra groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from agent_trainers.algorithms.episodes import is_rounding
from agent_trainers.batching.distributed import ProcessGroup
from agent_trainers.monitoring.episode_statistics import EpisodeSummary, summarise
from agent_trainers.rollout.collector import Collector
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tasks.samplers import DrawnTask, GroupResult, TaskSampler
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trajectory import Trajectory


class CollectedBatch(NamedTuple):
    """This process's episodes of a batch, metrics of the sampler, and seconds of generation."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    generate_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """This process's episodes of a batch before they run."""

    specs: list[EpisodeSpec]
    numbers: Sequence[int]
    """Their numbers among those of all processes."""
    drawn: list[DrawnTask]
    """The sampler's tasks of all processes' groups."""
    metrics: dict[str, float]
    """Those of the sampler."""


class TrainerRollouts:
    """Collects this process's episodes of training and evaluation batches."""

    def __init__(
        self,
        trainer: Any,
        collectors: dict[str, Collector],
        sampler: TaskSampler | None = None,
        env_names: Sequence[str] = (),
    ) -> None:
        """Collect for a `StepGRPOTrainer` with the given collectors, by mode.

        A `sampler` chooses the tasks of training instead of the rows of the dataset. `env_names`
        are the names of all environments, where rows have them.
        """
        self._args: StepGRPOConfig = trainer.args
        self._processes: ProcessGroup = trainer.processes
        self._extensions: Sequence[Extension] = trainer.extensions
        self._group_sizes = {"train": trainer.num_generations, "eval": trainer.num_generations_eval}
        self.collectors, self._sampler, self._env_names = collectors, sampler, list(env_names)
        self._seconds = 0.0

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
        """Collect one episode per row of the dataset; collective."""
        factors, self._seconds = reward_factors or {}, 0.0
        plan = self.plan(inputs, mode, step)
        trajectories = self._run(plan.specs, mode, step, factors)
        self._seconds += sum(t.timings["generate_seconds"] for t in trajectories)
        return self._finish(plan, trajectories, mode, step, factors)

    def plan(
        self,
        inputs: Sequence[Mapping[str, Any]],
        mode: str,
        step: tuple[int, int],
        drawn: Sequence[DrawnTask] = (),
    ) -> Plan:
        """Plan one episode per row, or per task of a group that was `drawn`; collective."""
        size = self._group_sizes[mode]
        counts = self._processes.all_gather(len(inputs))
        first = sum(counts[: self._processes.index])
        numbers = range(first, first + len(inputs))
        sampler = self._sampler if mode == "train" else None
        metrics: dict[str, float] = {}
        if sampler is not None:
            metrics = dict(sampler.metrics())
            drawn = drawn or sampler.draw(-(-sum(counts) // size))
            inputs = [drawn[i // size]._asdict() for i in numbers]
        specs = [
            self.spec(row, number, mode, step) for row, number in zip(inputs, numbers, strict=True)
        ]
        return Plan(specs, numbers, list(drawn), metrics)

    def _finish(
        self,
        plan: Plan,
        trajectories: list[Trajectory],
        mode: str,
        step: tuple[int, int],
        factors: Mapping[str, float],
    ) -> CollectedBatch:
        sampler, metrics = self._sampler if mode == "train" else None, plan.metrics
        if sampler is not None and (self._args.max_extra_groups or self._args.curriculum):
            places = [i // self._group_sizes[mode] for i in plan.numbers]
            results = self._results(places, trajectories, factors)
            extra = self._resample(sampler, trajectories, results, plan.numbers, step, factors)
            metrics = metrics | extra
            scored = [results[number] for number in sorted(results)]
            sampler.observe([r for r in scored if not math.isnan(r.success)])
        return CollectedBatch(trajectories, metrics, self._seconds)

    def spec(
        self, row: Mapping[str, Any], number: int, mode: str, step: tuple[int, int]
    ) -> EpisodeSpec:
        """Return the spec of an episode of a batch.

        Seeds depend on the place in the run, not on the process, so any number of processes runs
        the same episodes, and a resumed run continues with those of the unbroken run.
        """
        is_training = mode == "train"
        place = step if is_training else (0, 0)
        task, env = int(row["task"]), row.get("env", "")
        group, member = divmod(number, self._group_sizes[mode])
        # In training a task may come twice in a batch; in evaluation every task is new.
        key = group if is_training else task
        # The first environment has the seeds of a run with one environment.
        others = (place_of,) if env and (place_of := self._env_names.index(env)) else ()
        suffix = f"{key}-{env}" if env else key
        seeds = np.random.SeedSequence([self._args.seed, is_training, *place, task, *others])
        return EpisodeSpec(
            task=task,
            seed=int(seeds.generate_state(1)[0]),
            group_id=f"{mode}-{place[0]}-{place[1]}-{suffix}",
            rng=np.random.default_rng([self._args.seed, is_training, *place, key, member, *others]),
            env=env,
        )

    def _run(
        self,
        specs: Sequence[EpisodeSpec],
        mode: str,
        step: tuple[int, int],
        factors: Mapping[str, float],
    ) -> list[Trajectory]:
        trajectories = None
        for extension in self._extensions if mode == "train" else ():
            if trajectories is None:
                trajectories = extension.collect(specs, step, factors)
        return self.collectors[mode].collect(specs) if trajectories is None else trajectories

    def _resample(
        self,
        sampler: TaskSampler,
        trajectories: list[Trajectory],
        results: dict[int, GroupResult],
        numbers: Sequence[int],
        step: tuple[int, int],
        factors: Mapping[str, float],
    ) -> dict[str, float]:
        """Replace groups without variance in `trajectories`, and add to `results`.

        `numbers` are those of this process's episodes. Returns metrics.
        """
        size, budget = self._group_sizes["train"], self._args.max_extra_groups
        num_groups = len(results)
        held = dict(enumerate(sorted(results)))  # the group that each place of the batch holds
        while wanted := [p for p in held if not results[held[p]].has_variance][:budget]:
            new = {place: len(results) + i for i, place in enumerate(wanted)}
            budget -= len(wanted)
            tasks = dict(zip(wanted, sampler.draw(len(wanted)), strict=True))
            own = [i for i, number in enumerate(numbers) if number // size in tasks]
            places = [numbers[i] // size for i in own]
            specs = [
                self.spec(tasks[p]._asdict(), new[p] * size + numbers[i] % size, "train", step)
                for i, p in zip(own, places, strict=True)
            ]
            extra = self._run(specs, "train", step, factors)
            self._seconds += sum(t.timings["generate_seconds"] for t in extra)
            results |= self._results([new[p] for p in places], extra, factors)
            held |= {p: number for p, number in new.items() if results[number].has_variance}
            for i, place, trajectory in zip(own, places, extra, strict=True):
                if held[place] == new[place]:
                    trajectories[i] = trajectory
        success = [r.success for r in results.values() if not math.isnan(r.success)]
        return {
            "groups/extra": float(len(results) - num_groups),
            "groups/played_success": float(np.mean(success or [0.0])),
            "groups/played_without_variance": float(
                np.mean([not result.has_variance for result in results.values()])
            ),
        }

    def _results(
        self, numbers: Sequence[int], played: Sequence[Trajectory], factors: Mapping[str, float]
    ) -> dict[int, GroupResult]:
        """Return the outcome of each group of all processes, by number; collective."""
        own = [summarise(trajectory, factors) for trajectory in played if not trajectory.start]
        groups: dict[int, list[EpisodeSummary]] = {}
        pairs = list(zip(numbers, own, strict=True))
        for number, episode in self._processes.all_gather_objects(pairs):
            groups.setdefault(number, []).append(episode)
        results = {}
        for number, members in sorted(groups.items()):
            scored = [episode for episode in members if episode.is_scorable]
            returns = [sum(episode.rewards) for episode in scored] or [0.0]
            solved = [e.success if "success" in e.metrics else sum(e.rewards) > 0 for e in scored]
            results[number] = GroupResult(
                env=members[0].env,
                success=float(np.mean(solved)) if scored else math.nan,
                has_variance=not is_rounding(max(returns) - min(returns), 0.0),
            )
        return results
