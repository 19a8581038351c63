"""Groups without variance are played anew, within a budget; curricula are told what came of all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent_trainers.tasks.samplers import TaskPool, TaskSampler
from agent_trainers.trainers.rollouts import TrainerRollouts
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory, transition

GROUP = 3
POOL = TaskPool(env="", weight=1.0, tasks=range(12))


class OneProcess:
    index = 0

    def all_gather(self, value):
        return [value]

    def all_gather_objects(self, items):
        return list(items)


class Tasks:
    """Plays at once: what a task earns says whether its group has variance."""

    def __init__(self, varied):
        self.varied, self.specs = varied, []

    def collect(self, specs):
        self.specs += specs
        return [self.play(spec) for spec in specs]

    def play(self, spec):
        reward = float(spec.rng.random() if spec.task in self.varied else spec.task % 2)
        return trajectory(
            transition(reward=reward, terminated=True), task_id=str(spec.task),
            group_id=spec.group_id, metrics={"success": float(reward > 0.5)},
            timings={"generate_seconds": 1.0}, env=spec.env,
        )  # fmt: skip


def play(varied, budget, num_groups=4, draws=None, kind=Tasks):
    draws = draws or TaskSampler([POOL], 3)
    tasks = kind(varied)
    trainer = SimpleNamespace(
        args=SimpleNamespace(seed=0, max_extra_groups=budget, curriculum=None), extensions=[],
        processes=OneProcess(), num_generations=GROUP, num_generations_eval=1,
    )  # fmt: skip
    rollouts = TrainerRollouts(trainer, {"train": tasks}, draws)
    return rollouts.collect([{}] * (GROUP * num_groups), "train", (5, 0)), tasks


def groups(trajectories):
    own = [trajectories[i : i + GROUP] for i in range(0, len(trajectories), GROUP)]
    assert all(len({(t.task_id, t.group_id) for t in group}) == 1 for group in own)
    return [int(group[0].task_id) for group in own]


def order(count):
    """The tasks that are drawn, without any results."""
    return [task.task for task in TaskSampler([POOL], 3).draw(count)]


def test_groups_that_teach_nothing_give_way_to_others_within_the_budget():
    drawn = order(10)
    varied = {drawn[1], drawn[3], drawn[4], drawn[7]}
    # 0 and 2 teach nothing; 4 and 5 are played for them, then 6 for the place of 5
    played, tasks = play(varied, budget=3)
    assert groups(played.trajectories) == [drawn[4], drawn[1], drawn[2], drawn[3]]
    assert played.metrics["groups/extra"] == 3
    assert played.metrics["groups/played_without_variance"] == pytest.approx(4 / 7)
    assert played.generate_seconds == 7 * GROUP
    # one more, and there is none without variance
    played, _ = play(varied, budget=100)
    assert groups(played.trajectories) == [drawn[4], drawn[1], drawn[7], drawn[3]]
    assert played.metrics["groups/extra"] == 4
    ids = {trajectory.group_id for trajectory in played.trajectories}
    assert len(ids) == 4
    seeds = {spec.rng.bit_generator.seed_seq.entropy.__repr__() for spec in tasks.specs}
    assert len(seeds) == len(tasks.specs)
    # the budget ends what would have no end
    played, tasks = play(set(), budget=7)
    assert played.metrics["groups/extra"] == 7
    assert len(tasks.specs) == (4 + 7) * GROUP
    assert groups(played.trajectories) == order(4)


class Broken(Tasks):
    def play(self, spec):
        return replace(super().play(spec), stop_reason=StopReason.ENVIRONMENT_ERROR)


class Recording(TaskSampler):
    def observe(self, results):
        self.results = list(results)


@pytest.mark.parametrize("kind", [Tasks, Broken])
def test_a_sampler_observes_every_group_that_was_played_and_scored(kind):
    draws = Recording([POOL], 3)
    varied = set() if kind is Tasks else set(range(12))
    played, tasks = play(varied, budget=2, draws=draws, kind=kind)
    assert played.metrics["groups/extra"] == 2
    seen = {spec.task for spec in tasks.specs} if kind is Tasks else set()
    assert sorted(result.success for result in draws.results) == sorted(t % 2 for t in seen)
    assert kind is Tasks or played.metrics["groups/played_success"] == 0.0
