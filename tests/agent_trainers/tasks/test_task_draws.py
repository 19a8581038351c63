import itertools
from collections import Counter

import pytest

from agent_trainers.tasks.samplers import TaskPool, TaskSampler


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
    drawn = draws(a=(1, [3, 5, 8]), b=(1, None)).draw(24)
    of_a = [task.task for task in drawn if task.env == "a"]
    passes = [of_a[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(tasks) == [3, 5, 8] for tasks in passes)
    assert len({tuple(tasks) for tasks in passes}) > 1
    assert len({task.task for task in drawn if task.env == "b"}) == 12


def test_draws_go_on_from_a_state_as_if_nothing_had_happened():
    pools = {"a": (2, list(range(5))), "b": (1, None), "c": (0.7, list(range(3)))}
    whole = draws(**pools).draw(60)
    first = draws(**pools)
    assert first.draw(23) == whole[:23]
    second = draws(**pools)
    second.load_state_dict(first.state_dict())
    assert second.draw(37) == whole[23:]


def test_another_seed_draws_other_tasks():
    pools = {"a": (1, list(range(50))), "b": (1, None)}
    assert draws(**pools).draw(20) == draws(**pools).draw(20)
    assert draws(**pools).draw(20) != draws(8, **pools).draw(20)
