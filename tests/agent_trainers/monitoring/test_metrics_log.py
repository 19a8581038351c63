import json
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from agent_envs import DataError
from agent_trainers.monitoring import metrics_log
from agent_trainers.monitoring.metrics_log import (
    METRICS_FILE,
    MetricsLog,
    StepClock,
    _line,
    read_metrics,
)


def state(step=0, history=(), is_main=True):
    return SimpleNamespace(
        global_step=step, log_history=list(history), is_world_process_zero=is_main
    )


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(output_dir=str(tmp_path / "run"))


def run(args, *entries, begin=None):
    """Log entries (step, value) of a run that begins at `begin`."""
    log = MetricsLog()
    log.on_train_begin(args, begin or state(), None)
    for step, value in entries:
        log.on_log(args, state(step), None, logs={"reward": value})


def logged(args):
    return [(record["step"], record.get("reward")) for record in read_metrics(args.output_dir)]


def test_each_log_entry_is_a_line_and_a_new_run_starts_a_new_file(args, tmp_path):
    run(args, begin=state(is_main=False))  # other processes write nothing
    assert not (tmp_path / "run").exists()
    run(args, (1, 0.5), (2, 0.75))
    assert logged(args) == [(1, 0.5), (2, 0.75)]
    log = MetricsLog()
    log.on_log(args, state(), None, logs={"eval_reward": 0.125})  # before training
    log.on_train_begin(args, state(), None)
    log.on_log(args, state(1), None, logs={"reward": 0.25})
    assert logged(args) == [(0, None), (1, 0.25)]


def test_a_resumed_run_removes_the_lines_after_its_checkpoint(args, tmp_path):
    # two entries at step 2 (training, evaluation) were in the checkpoint; the summary was not
    run(args, (1, 0.1), (2, 0.2), (2, 0.25), (2, 0.3), (3, 0.4))
    with (tmp_path / "run" / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "rew')  # killed while it wrote
    history = [{"step": 1}, {"step": 2}, {"step": 2}]
    run(args, (3, 0.5), begin=state(2, history))
    assert logged(args) == [(1, 0.1), (2, 0.2), (2, 0.25), (3, 0.5)]


@pytest.mark.parametrize("line", ["{", "[1]", '{"reward": 1}', '{"step": "x"}', "7"])
def test_a_wrong_line_is_named_and_one_that_is_still_being_written_left_out(tmp_path, line):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(tmp_path / "none.jsonl")


@pytest.mark.parametrize("value", [0.1, -(2**70), True, None, "a\n\u2028\ud800", np.nan, -np.inf])
def test_any_value_makes_a_line_that_strict_json_reads(value):
    def refuse(constant):
        raise AssertionError(constant)

    line = _line({"step": 1, "value": value})
    assert line.count("\n") == 1
    read = json.loads(line, parse_constant=refuse)["value"]
    is_finite = not isinstance(value, float) or np.isfinite(value)
    assert read == (value if is_finite else None)


def test_the_seconds_of_a_step_are_split_into_its_parts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    metrics = defaultdict(list)
    clock = StepClock(metrics)
    for _ in range(2):  # a step begins at zero
        clock.on_step_begin(None, None, None)
        with clock.measure("rollout"):
            assert clock.part == "rollout"
            wait(3)
        with clock.measure("score"):
            wait(1)
        clock.note_generation(2.0)
        assert clock.part == "train"
        wait(4)
        clock.on_step_end(None, None, None)
    assert dict(metrics) == {
        "time/rollout_seconds": [3, 3],
        "time/wait_seconds": [1, 1],  # 3 seconds, in 2 of which tokens were generated
        "time/score_seconds": [1, 1],
        "time/train_seconds": [4, 4],
    }
