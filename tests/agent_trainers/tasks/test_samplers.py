import itertools
from collections import Counter

import pytest

from agent_envs.errors import ConfigurationError
from agent_trainers.tasks.samplers import GroupResult, TaskPool, TaskSampler, parse_curriculum

LEVELS = [TaskPool(env=name, weight=1.0, tasks=None) for name in ("easy", "middle", "hard")]


def result(env, success):
    return GroupResult(env, success, has_variance=0 < success < 1)


def make(curriculum, pools=LEVELS, seed=7):
    return TaskSampler(pools, seed, parse_curriculum(curriculum))


def drawn(draws, count=100):
    return Counter(task.env for task in draws.draw(count))


def test_the_next_level_begins_once_the_newest_is_solved_and_earlier_ones_are_reviewed():
    draws = make({"kind": "levels", "groups": 3, "target": 0.5, "review": 0.2})
    assert drawn(draws) == {"easy": 100}
    draws.observe([result("easy", 0.0), result("easy", 1.0)])
    assert draws.metrics()["curriculum/level"] == 1  # three groups are asked for
    draws.observe([result("easy", 0.5), result("middle", 1.0)])
    assert draws.metrics()["curriculum/level"] == 2  # (0 + 1 + 0.5) / 3; the level is new to it
    assert drawn(draws) == {"easy": 20, "middle": 80}
    draws.observe([result("easy", 1.0)] * 5 + [result("middle", 0.0)] * 2)
    assert draws.metrics()["curriculum/level"] == 2
    draws.observe([result("middle", 1.0)] * 3 + [result("hard", 1.0)] * 4)
    assert draws.metrics()["curriculum/level"] == 3  # and there it stays
    shares = drawn(draws)
    assert [shares[name] for name in ("easy", "middle", "hard")] == [10, 10, 80]
    assert draws.metrics()["curriculum/share/easy"] == pytest.approx(0.1)


@pytest.mark.parametrize("curriculum", [None, {"kind": "levels", "groups": 1, "target": 0.5}])
def test_restored_draws_go_on_as_if_nothing_had_happened(curriculum):
    weights = {"a": 2 if curriculum is None else 1, "b": 1}
    pools = [TaskPool(env=name, weight=w, tasks=range(9)) for name, w in weights.items()]

    def play(draws):
        tasks = draws.draw(5)
        draws.observe([result(t.env, (t.task % 3) / 2) for t in tasks])
        return tasks

    whole = make(curriculum, pools)
    for _ in range(4):
        play(whole)
    state = whole.state_dict()
    rest = [play(whole) for _ in range(6)]
    resumed = make(curriculum, pools)
    resumed.load_state_dict(state)
    assert [play(resumed) for _ in range(6)] == rest
    assert resumed.metrics() == whole.metrics()


@pytest.mark.parametrize(("curriculum", "pools", "message"), [
    ("level", LEVELS, "^curriculum: kind: Input should be 'levels'"),
    ({"kind": "levels", "target": 0}, LEVELS, "target: .*greater than 0"),
    ('{"kind": "levels"', LEVELS, "not valid JSON"),
    ("levels", LEVELS[:1], "needs several environments"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_a_way_out(curriculum, pools, message):
    with pytest.raises(ConfigurationError, match=message):
        make(curriculum, pools)


def draws(seed=7, **pools):
    """Draws from pools, each given as (weight, tasks)."""
    made = [TaskPool(env=name, weight=w, tasks=tasks) for name, (w, tasks) in pools.items()]
    return TaskSampler(made, seed)


@pytest.mark.parametrize("weights", [(2, 1), (1, 1, 1), (5, 0.3, 1.7)])
def test_every_stretch_of_draws_holds_each_share_up_to_one_group(weights):
    names = "abcdef"[: len(weights)]
    drawn = draws(**{n: (w, None) for n, w in zip(names, weights, strict=True)}).draw(200)
    for start, length in itertools.product(range(0, 150, 7), (1, 4, 16, 50)):
        counts = Counter(task.env for task in drawn[start : start + length])
        for name, weight in zip(names, weights, strict=True):
            # a pool's account stays above -1 and below 1 for two pools, a bit more for several
            assert abs(counts[name] - length * weight / sum(weights)) < len(weights)


def test_a_finite_pool_is_played_in_random_passes_and_an_endless_one_at_random():
    pools = {"a": (1, [3, 5, 8]), "b": (1, None)}
    drawn = draws(**pools).draw(24)
    of_a = [task.task for task in drawn if task.env == "a"]
    passes = [of_a[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(tasks) == [3, 5, 8] for tasks in passes)
    assert len({tuple(tasks) for tasks in passes}) > 1
    assert len({task.task for task in drawn if task.env == "b"}) == 12
    assert draws(**pools).draw(24) == drawn != draws(8, **pools).draw(24)
