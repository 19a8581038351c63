"""Fixed task lists and the hashes of their content."""

import dataclasses
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.core.tasks import Task
from agent_leaderboard.play.config import DEFAULT_TASKS
from agent_leaderboard.play.environments import configured_environment
from agent_leaderboard.play.prepare import (
    complete_record,
    draw_tasks,
    list_tasks,
    task_labels,
    task_sha256,
)
from agent_leaderboard.records.manifest import HIDDEN_SEEDS, EnvironmentRecord, published
from agent_leaderboard.records.results import task_list_sha256
from agent_leaderboard.records.sealing import Seal

PUBLIC = Seal()
TASK = Task(
    id="a",
    question="Who?",
    answers=("Ada", "A. H."),
    data={"gold": (("T", "x"),), "n": np.int64(3)},
)


def open_env(name, **kwargs):
    return gym.make(f"AgentR1/{name}-v0", **kwargs).unwrapped


@pytest.mark.parametrize(
    "change",
    [
        {"id": "b"},
        {"question": "Who? "},
        {"answers": ("Ada",)},
        {"answers": ("A. H.", "Ada")},
        {"data": {"gold": (("T", "y"),), "n": np.int64(3)}},
        {"data": {"gold": (("T", "x"),)}},
    ],
)
def test_any_change_of_a_task_is_another_hash(change):
    assert task_sha256(dataclasses.replace(TASK, **change), PUBLIC) != task_sha256(TASK, PUBLIC)


def test_with_a_key_the_hash_is_another():
    assert task_sha256(TASK, Seal(b"key")) != task_sha256(TASK, PUBLIC)


def test_the_hash_does_not_depend_on_types_that_say_the_same():
    same = dataclasses.replace(TASK, data={"n": 3, "gold": [["T", "x"]]})
    assert task_sha256(same, PUBLIC) == task_sha256(TASK, PUBLIC)
    assert task_sha256(dataclasses.replace(TASK, question="\ud800"), PUBLIC)


def test_tasks_are_drawn_by_seed_without_repetition_or_are_the_first_of_an_endless_family(
    hotpot_file,
):
    endless, finite = open_env("SyntheticTable"), open_env("HotpotQA", data=hotpot_file)
    assert draw_tasks(endless, 4, seed=1) == [0, 1, 2, 3]
    assert draw_tasks(finite, 100, seed=1) == [0, 1]
    drawn = {draw_tasks(finite, 1, seed)[0] for seed in range(20)}
    assert drawn == {0, 1}


def test_generated_tasks_have_the_hashes_of_the_published_run():
    """A refactoring of an environment must not change its tasks, nor how they are hashed."""
    names = {"SyntheticTable": "synthetic-table", "SyntheticArithmetic": "synthetic-arithmetic",
             "SyntheticMultiHop": "synthetic-multi-hop"}  # fmt: skip
    records = {record.slug: record for record in published().environments}
    for name, slug in names.items():
        env = open_env(name, **records[slug].kwargs)
        entries = list_tasks(env, draw_tasks(env, records[slug].num_tasks, 0), PUBLIC)
        assert task_list_sha256(entries) == records[slug].tasks_sha256, name


def test_a_hidden_seed_draws_other_tasks_of_generated_families_too():
    env = open_env("SyntheticTable", split="test")
    assert draw_tasks(env, 3, HIDDEN_SEEDS - 1) == [0, 1, 2]
    drawn = [draw_tasks(env, 50, HIDDEN_SEEDS + i) for i in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 50
    assert min(drawn[0] + drawn[2]) > 10_000  # of 2**31; 0.05 % of all seeds draw a smaller one
    env.reset(seed=0, options={"task": max(drawn[0])})


def test_a_hidden_seed_draws_tasks_of_a_data_set_without_those_of_the_published_run():
    env = SimpleNamespace(num_tasks=125)
    public = draw_tasks(env, DEFAULT_TASKS, 0)
    hidden = draw_tasks(env, 100, HIDDEN_SEEDS)
    assert sorted([*public, *hidden]) == list(range(125))
    few = [draw_tasks(env, 10, HIDDEN_SEEDS + i) for i in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    assert len(set(few[0]) - set(public)) == 10
    assert draw_tasks(SimpleNamespace(num_tasks=100), 100, HIDDEN_SEEDS) == []


def test_a_hidden_split_has_no_task_of_the_published_run(small_data, monkeypatch):
    record = EnvironmentRecord(
        slug="hotpotqa", id="AgentR1/HotpotQA-v0", kwargs={"data": "${data}/hotpot.jsonl"},
        num_tasks=1, contamination="made up",
    )  # fmt: skip
    board = SimpleNamespace(environments=[record])  # one of two tasks
    monkeypatch.setattr("agent_leaderboard.play.prepare.published", lambda: board)
    make_env = configured_environment(record, None, small_data)
    for seed in range(HIDDEN_SEEDS, HIDDEN_SEEDS + 5):
        public, hidden = (
            complete_record(record, make_env, count=count, seed=own, data=small_data)[1]
            for count, own in ((1, 0), (2, seed))
        )
        assert sorted(entry.task for entry in public + hidden) == [0, 1]


@pytest.mark.parametrize("name", ["SyntheticMultiHop", "CommandLine", "ReasoningGym"])
def test_the_list_of_a_generated_environment_is_the_same_each_time(name, strong_sandbox):
    lists = [list_tasks(open_env(name, split="test"), [0, 5], PUBLIC) for _ in range(2)]
    assert lists[0] == lists[1]
    assert lists[0][0].sha256 != lists[0][1].sha256


def test_labels_say_type_hops_and_level_where_the_task_does(hotpot_file):
    (first, second) = list_tasks(open_env("HotpotQA", data=hotpot_file), [0, 1], PUBLIC)
    assert first.labels == {"type": "bridge", "level": "hard", "hops": 2}
    assert second.labels["type"] == "comparison"
    (multi_hop,) = list_tasks(
        open_env("SyntheticMultiHop", hops=3, max_episode_steps=9), [0], PUBLIC
    )
    assert multi_hop.labels == {"hops": 3}
    assert task_labels(Task(id="a", question="q", answers=())) == {}
