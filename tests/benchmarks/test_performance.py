"""Smoke tests of the performance benchmarks at the smallest size, and of the shared timing."""

import importlib
import json

import pytest

from benchmarks import held_out
from benchmarks.performance import gradients, time_to_success, training
from benchmarks.performance.interleaved import train_interleaved
from benchmarks.performance.models import Settings
from benchmarks.performance.step_time import PAIRS_PER_ROUND

TINY = Settings(
    rounds=1, step_model="tiny", gradient_model="tiny", num_questions=2, num_generations=2,
    num_steps=(2,), memory_steps=(2,), num_trajectories=2, token_budget=1600, num_episodes=8,
    num_calls=2, fast_seconds=0.001, slow_seconds=0.05,
)  # fmt: skip
STEP = {"time/rollout_seconds": 0.5, "time/score_seconds": 0.25, "time/train_seconds": 0.25}
COMMANDS = [
    "credit.__main__", "held_out", "papers_real.__main__",
    "papers_table", "performance.environments",
    "performance.sandbox", "performance.time_to_success",
    "performance.training",
]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    assert end.value.code in (0, None)
    assert "--" in capsys.readouterr().out


def test_training_is_measured_on_both_sides_with_the_same_episodes(monkeypatch):
    # in this process, where the numbers mean nothing
    monkeypatch.setattr(gradients, "_peak_in_process", gradients._peak)
    results = training.measure(TINY, tuple(training.PARTS))
    json.dumps(results)
    names = {"step_time_vs_trl", "rollout_vs_trl", "rollout_vs_ideal"}
    assert set(results) == {"machine", "merged_vs_rows", "memory_vs_budget", *names}
    ours, theirs = results["step_time_vs_trl"]["per_step"].values()
    # 2 questions x 2 generations x 4 turns of the script
    expected = [16] * PAIRS_PER_ROUND
    assert ours["environment_steps"]["values"] == theirs["environment_steps"]["values"] == expected
    assert ours["sampled_tokens"]["values"] == theirs["sampled_tokens"]["values"]
    (one,) = results["merged_vs_rows"].values()
    speed = one["merged"]
    assert speed["tokens_per_second"] == pytest.approx(one["merged_tokens"] / one["ours"]["median"])
    assert one["row_tokens"] > one["merged_tokens"]
    lines = training.describe(results)
    assert len(lines) == 5 + 1  # comparisons, and the speed of one


class FakeTrainer:
    """Takes three steps and calls its callback."""

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


def test_trainers_alternate_and_the_first_step_is_not_counted():
    log = []
    trainers = {name: FakeTrainer(name, log) for name in "ab"}
    steps = train_interleaved(
        trainers, 2, before_round=lambda: log.append("round"), facts={"a": lambda: {"n": len(log)}}
    )
    assert log == ["round", "b", "a", "round", "a", "b", "round", "b", "a"]
    assert [step.facts for step in steps["a"]] == [{"n": 5}, {"n": 9}]
    assert all(0 <= step.gradient_seconds <= step.seconds for step in steps["b"])
    trainers = {"a": FakeTrainer("a", log), "b": FakeTrainer("b", log, fails_at=1)}
    with pytest.raises(RuntimeError, match="b broke"):
        train_interleaved(trainers, 2)


def test_the_goal_is_reached_at_the_first_of_two_consecutive_checkpoints():
    solved = {10: 0.99, 2: 0.5, 4: 0.95, 6: 0.85, 8: 0.9}
    found = time_to_success.summarize([STEP] * 12, solved)
    assert found["reached"] == {"steps": 8, "seconds": 8.0}
    assert found["seconds_per_step"]["score"] == 0.25
    assert time_to_success.summarize([STEP] * 4, {2: 0.5, 4: 1.0})["reached"] is None


@pytest.mark.parametrize("name", held_out.HELD_OUT)
def test_held_out_variants_differ_from_the_mixture_and_can_be_solved(name):
    changes = held_out.HELD_OUT[name]
    trained, changed = held_out.mixture().keywords, held_out.mixture(**changes).keywords
    for argument in {"variant", "hops", "top_k"} & changes.keys():
        value = changed[argument]
        assert not set(trained[argument]) & set(value if isinstance(value, list) else [value])
    env = held_out.mixture(**changes)()
    env.reset(options={"task": 0})
    for action in env.unwrapped.reference_actions():
        *_, info = env.step(action)
    assert info["metrics"]["success"] == 1.0
