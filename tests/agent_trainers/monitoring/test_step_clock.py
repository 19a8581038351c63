import contextlib
from collections import defaultdict

import pytest

from agent_trainers.monitoring import step_clock
from agent_trainers.monitoring.step_clock import StepClock


@pytest.fixture
def wait(monkeypatch):
    """Let time pass without waiting."""
    now = [100.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_the_seconds_of_a_step_are_split_into_its_parts(wait):
    metrics = defaultdict(list)
    clock = StepClock(metrics)
    for _ in range(2):  # a step begins at zero
        clock.on_step_begin(None, None, None)
        with clock.measure("rollout"):
            assert clock.part == "rollout"
            wait(3)
        clock.note_generation(2.0)
        with clock.measure("score"):
            wait(1)
        assert clock.part == "train"
        wait(4)
        clock.on_step_end(None, None, None)
    assert dict(metrics) == {
        "time/rollout_seconds": [3, 3],
        "time/wait_seconds": [1, 1],  # 3 seconds, in 2 of which tokens were generated
        "time/score_seconds": [1, 1],
        "time/train_seconds": [4, 4],
    }


def test_a_part_inside_another_is_not_counted_twice(wait):
    clock = StepClock(defaultdict(list))
    clock.on_step_begin(None, None, None)
    with clock.measure("rollout"):
        wait(1)
        with clock.measure("score"):
            wait(2)
    assert clock.seconds()["rollout"] == 1
    assert clock.seconds()["score"] == 2


def test_a_part_that_fails_is_over(wait):
    clock = StepClock(defaultdict(list))
    clock.on_step_begin(None, None, None)
    with contextlib.suppress(ValueError), clock.measure("rollout"):
        wait(1)
        raise ValueError("broken")
    assert clock.part == "train"
    assert clock.seconds()["rollout"] == 1
