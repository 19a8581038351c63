"""What the benchmark of training measures, at next to no size: the shape of its results."""

import json

import pytest

from agent_trainers import TINY_POLICY
from benchmarks.performance import peak_memory, training
from benchmarks.performance.alternation import train_in_turns
from benchmarks.performance.comparison import compare
from benchmarks.performance.settings import Settings
from benchmarks.performance.slow_search import ToolLatencies
from benchmarks.performance.step_time import PAIRS_PER_ROUND

TINY = Settings(
    rounds=1, step_model="tiny", gradient_model="tiny", num_questions=2, num_generations=2,
    num_steps=(2,), memory_steps=(2,), num_trajectories=2, token_budget=1600, num_episodes=8,
    num_calls=2, fast_seconds=0.001, slow_seconds=0.05, language_model=str(TINY_POLICY),
)  # fmt: skip
SIMPLE = (
    "step_time_vs_trl", "rollout_vs_trl", "rollout_vs_ideal", "language_model_vs_trl",
    "language_model_vs_bare",
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        # in this process, to be quick; the numbers mean nothing then
        patch.setattr(peak_memory, "_in_own_process", peak_memory._measure)
        return training.measure(TINY, tuple(training.PARTS))


def comparisons(results):
    for name in SIMPLE:
        yield results[name]
    yield from results["merged_vs_rows"].values()
    yield from results["memory_vs_budget"].values()


def test_every_comparison_has_median_spread_target_and_both_sides(results):
    assert set(results) == {
        "machine", "merged_vs_rows", "memory_vs_budget", *SIMPLE,
    }  # fmt: skip
    for one in comparisons(results):
        is_step = one is results["step_time_vs_trl"]
        assert len(one["values"]) == (PAIRS_PER_ROUND if is_step else 1)
        assert one["min"] == min(one["values"])
        assert one["min"] <= one["median"] <= one["max"] == max(one["values"])
        assert {"target", "is_reached", "ours", "other"} <= set(one)
    assert set(results["merged_vs_rows"]) == set(results["memory_vs_budget"]) == {"2"}
    json.dumps(results)


def test_both_trainers_play_the_same(results):
    ours, theirs = results["step_time_vs_trl"]["per_step"].values()
    # 2 questions x 2 generations x 4 turns of the script
    expected = [16] * PAIRS_PER_ROUND
    assert ours["environment_steps"]["values"] == theirs["environment_steps"]["values"] == expected
    assert ours["sampled_tokens"]["values"] == theirs["sampled_tokens"]["values"]


def test_it_says_how_fast_it_went(results):
    (one,) = results["merged_vs_rows"].values()
    speed = one["merged"]
    tokens = one["merged_tokens"]
    assert speed["tokens_per_second"] == pytest.approx(tokens / one["ours"]["median"])
    expected = 6 * speed["parameters"] * speed["tokens_per_second"]
    assert speed["model_flops_per_second"] == pytest.approx(expected)
    assert one["row_tokens"] > tokens
    lines = training.describe(results)
    assert len(lines) == 7 + 2  # comparisons, and how fast two of them went
    assert any("tokens per second" in line for line in lines)


def test_ratios_are_taken_per_pair():
    share = compare([1.0, 2.0, 9.0], [2.0, 2.0, 10.0], target=0.8)
    assert share["values"] == [0.5, 1.0, 0.9]
    assert (share["median"], share["min"], share["max"]) == (0.9, 0.5, 1.0)
    assert not share["is_reached"]
    speedup = compare([1.0, 2.0], [3.0, 5.0], target=2.5, is_speedup=True)
    assert speedup["values"] == [3.0, 2.5]
    assert speedup["is_reached"]


class FakeTrainer:
    """Takes three steps and tells its callback."""

    def __init__(self, name, log, *, fails_at=None):
        self.name, self.log, self.fails_at = name, log, fails_at
        self.callbacks = []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def remove_callback(self, _):
        pass

    def train(self):
        for number in range(3):
            for callback in self.callbacks:
                callback.on_step_begin(None, None, None)
            if number == self.fails_at:
                raise RuntimeError(f"{self.name} broke")
            self.log.append(self.name)
            for callback in self.callbacks:
                callback.on_pre_optimizer_step(None, None, None)
                callback.on_step_end(None, None, None)


def test_trainers_take_turns_and_the_first_step_is_not_counted():
    log = []
    trainers = {name: FakeTrainer(name, log) for name in "ab"}
    steps = train_in_turns(
        trainers, 2, before_round=lambda: log.append("round"), facts={"a": lambda: {"n": len(log)}}
    )
    assert log == ["round", "b", "a", "round", "a", "b", "round", "b", "a"]
    assert [step.facts for step in steps["a"]] == [{"n": 5}, {"n": 9}]
    assert len(steps["b"]) == 2
    assert all(0 <= step.gradient_seconds <= step.seconds for step in steps["b"])


def test_a_trainer_that_fails_ends_both():
    log = []
    trainers = {"a": FakeTrainer("a", log), "b": FakeTrainer("b", log, fails_at=1)}
    with pytest.raises(RuntimeError, match="b broke"):
        train_in_turns(trainers, 2)


def test_both_sides_meet_the_same_latencies():
    ours, theirs = (
        ToolLatencies(
            seed=1, num_episodes=2, num_calls=3, fast_seconds=0.1, slow_seconds=2.0, slow_share=0.3
        )
        for _ in range(2)
    )
    assert [ours.begin_episode() for _ in range(4)] == [0, 1, 2, 3]
    table = [[ours.seconds(episode, call) for call in range(4)] for episode in range(4)]
    assert table == [[theirs.seconds(e, c) for c in range(4)] for e in range(4)]
    assert {seconds for row in table for seconds in row} == {0.0, 0.1, 2.0}
    assert [row[3] for row in table] == [0.0] * 4
    assert ours.longest_episode(1) == max(sum(table[2]), sum(table[3]))
    ours.is_off = True
    assert ours.seconds(ours.begin_episode(), 0) == 0.0
