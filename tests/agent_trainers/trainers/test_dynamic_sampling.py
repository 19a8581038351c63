"""Groups without variance are played anew, within a budget; curricula are told what came of all."""

from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from datasets import Dataset

from agent_envs.errors import ConfigurationError
from agent_trainers.cli.environments import environment_maker
from agent_trainers.tasks.env_members import EnvMember, name_members
from agent_trainers.tasks.samplers import TaskPool, TaskSampler, make_sampler, parse_curriculum
from agent_trainers.tasks.sources import with_levels
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.rollouts import TrainerRollouts
from agent_trainers.trajectory import StopReason, Trajectory, Transition
from tests.agent_trainers.trainers.logs import assert_same_history, history

ID = "AgentR1/SyntheticMultiHop-v0"
GROUP = 3


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
        step = Transition(
            messages=[{"role": "user", "content": "?"}], prompt_ids=[1], completion_ids=[2],
            logprobs=np.zeros(1, np.float32), action="a", reward=reward, reward_terms={},
            terminated=True, truncated=False, info={},
        )  # fmt: skip
        return Trajectory(
            task_id=str(spec.task), group_id=spec.group_id, transitions=[step],
            metrics={"success": float(reward > 0.5)}, timings={"generate_seconds": 1.0},
            stop_reason=StopReason.ANSWERED, env=spec.env,
        )  # fmt: skip


def play(varied, budget, num_groups=4, draws=None, kind=Tasks):
    draws = draws or TaskSampler([TaskPool(env="", weight=1.0, tasks=range(12))], 3)
    tasks = kind(varied)
    rollouts = TrainerRollouts(
        SimpleNamespace(seed=0, max_extra_groups=budget, curriculum=None),
        OneProcess(),
        {"train": GROUP},
        {"train": tasks},
        sampler=draws,
    )
    return rollouts.collect([{}] * (GROUP * num_groups), "train", (5, 0)), tasks


def groups(trajectories):
    own = [trajectories[i : i + GROUP] for i in range(0, len(trajectories), GROUP)]
    assert all(len({(t.task_id, t.group_id) for t in group}) == 1 for group in own)
    return [int(group[0].task_id) for group in own]


def order(count):
    """The tasks that are drawn, without any results."""
    return [task.task for task in TaskSampler([TaskPool(env="", weight=1.0, tasks=range(12))],
                                            3).draw(count)]  # fmt: skip


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


def test_the_budget_ends_what_would_have_no_end():
    played, tasks = play(set(), budget=7)
    assert played.metrics["groups/extra"] == 7
    assert len(tasks.specs) == (4 + 7) * GROUP
    assert groups(played.trajectories) == order(4)


def test_a_curriculum_is_told_of_every_group_that_was_played():
    pool = TaskPool(env="", weight=1.0, tasks=range(12))
    draws = make_sampler(parse_curriculum("pools"), [pool], 3)
    played, tasks = play(set(), budget=2, draws=draws)
    seen = {spec.task for spec in tasks.specs}
    assert played.metrics["curriculum/tasks/new"] == 12  # of these it was drawn
    assert draws.metrics()["curriculum/tasks/new"] == 12 - len(seen)
    assert draws.metrics()["curriculum/tasks/easy"] == sum(task % 2 for task in seen)


def test_a_group_that_nobody_could_score_is_played_anew_and_tells_a_curriculum_nothing():
    class Broken(Tasks):
        def play(self, spec):
            return replace(super().play(spec), stop_reason=StopReason.ENVIRONMENT_ERROR)

    pool = TaskPool(env="", weight=1.0, tasks=range(12))
    draws = make_sampler(parse_curriculum("pools"), [pool], 3)
    played, _ = play(set(range(12)), budget=2, draws=draws, kind=Broken)
    assert played.metrics["groups/extra"] == 2
    assert draws.metrics()["curriculum/tasks/new"] == 12
    assert played.metrics["groups/played_success"] == 0.0


@pytest.fixture
def make_trainer(tiny_policy, tokenizer, make_config):
    def make(env=ID, **changes):
        settings = {"per_device_train_batch_size": 8, "max_steps": 5} | changes
        return StepGRPOTrainer(
            tiny_policy, env, make_config(**settings), processing_class=tokenizer
        )

    return make


@pytest.mark.parametrize("changes", [
    {"curriculum": '{"kind": "levels", "arguments": {"hops": [2, 1]}, "groups": 2, "target": 0.1}',
     "max_extra_groups": 2},
    {"env": lambda: gym.make(ID), "max_extra_groups": 3, "steps_per_generation": 2,
     "num_iterations": 2},
], ids=["levels", "extra groups"])  # fmt: skip
def test_a_run_goes_on_from_a_checkpoint_with_the_tasks_it_would_have_played(
    make_trainer, tmp_path, changes
):
    settings = {"save_strategy": "steps", "save_steps": 3} | changes
    whole = make_trainer(**settings)
    whole.train()
    resumed = make_trainer(output_dir=str(tmp_path / "resumed"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for one, other in zip(
        whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert_same_history(resumed, whole)
    logged = [entry for entry in history(whole) if "reward" in entry]
    if "max_extra_groups" in changes:
        assert max(entry["groups/extra"] for entry in logged) > 0
    if "levels" in changes.get("curriculum", ""):
        assert [logged[i]["curriculum/level"] for i in (0, -1)] == [1, 2]
        names = ["SyntheticMultiHop-v0,hops=2", "SyntheticMultiHop-v0,hops=1"]
        assert [f"env/{name}/share" in logged[0] for name in names] == [True, True]


@pytest.mark.parametrize(("changes", "message"), [
    ({"max_extra_groups": -1}, "0 or more"),
    ({"curriculum": "levels"}, "needs several environments"),
    ({"curriculum": "pools"}, "endless"),
    ({"env": [{"id": ID}, {"id": ID, "name": "b"}],
      "curriculum": '{"kind": "levels", "arguments": {"hops": [1, 2]}}'}, "exactly one"),
])  # fmt: skip
def test_what_would_do_nothing_is_refused(make_trainer, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(**changes)


def test_the_environment_of_a_command_line_becomes_levels_with_names_and_its_tasks():
    curriculum = parse_curriculum({"kind": "levels", "arguments": {"hops": [1, 3]}})
    given = EnvMember(id=environment_maker(ID, {"hops": 2, "top_k": 3}), name="mine")
    rows = Dataset.from_dict({"task": [4, 5, 4]})  # a draw with repeats
    levels, left = with_levels([given], rows, curriculum)
    assert left is None
    assert [list(member.tasks) for member in levels] == [[4, 5], [4, 5]]
    named, _ = name_members(levels)
    assert [m.name for m in named] == ["SyntheticMultiHop-v0,hops=1", "SyntheticMultiHop-v0,hops=3"]
    assert named[1].make_env().spec.kwargs == {"hops": 3, "top_k": 3}
