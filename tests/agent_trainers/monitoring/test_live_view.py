import io
import logging
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_trainers.monitoring import live_view
from agent_trainers.monitoring.live_view import (
    ASCII_BLOCKS,
    BLOCKS,
    LiveView,
    RunView,
    SuccessProgress,
    show_progress,
    sparkline,
    time_split,
)

LOGS = {"reward": 0.5, "success": 0.25, "rewards/exact_match": 0.4, "loss": 0.125, "entropy": 0.3,
        "time/rollout_seconds": 2.0, "time/wait_seconds": 0.5, "time/score_seconds": 0.25,
        "time/train_seconds": 1.0, "actions/bad_json": 0.03, "episodes/timeout": 0.0,
        "actions/invalid": 0.03, "tools/failures": 0.02, "epoch": None}  # fmt: skip


def draw(view, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view)
    return console.file.getvalue()


def test_the_view_shows_step_curves_terms_time_and_failures():
    view = RunView("a run", 10)
    view.add({**LOGS, "success": 0.0})
    view.add(LOGS)
    view.step, view.seconds_left = 4, 75.0
    shown = draw(view)
    for part in ("a run", "step 4/10", "1:15 left", "success", "25.0%", "▁█", "exact_match",
                 "+0.400", "entropy 0.300", "3.25 s a step", "generate 1.50", "environment 0.50",
                 "train 1.00", "bad_json 3.0%", "tool failures 2.0%"):  # fmt: skip
        assert part in shown
    assert "timeout" not in shown  # there were none
    assert "invalid" not in shown  # its codes are there


def test_the_view_shows_what_a_curriculum_draws_and_the_extra_groups():
    view = RunView("a run", 10)
    shares = {"curriculum/share/hops=1": 0.2, "curriculum/share/hops=2": 0.8,
              "curriculum/share/hops=3": 0.0}  # fmt: skip
    view.add({**LOGS, **shares, "curriculum/level": 2.0, "groups/extra": 3.0})
    shown = draw(view)
    for part in ("drawn  hops=2 80%   hops=1 20%", "level 2", "extra groups 3"):
        assert part in shown
    assert "hops=3" not in shown
    assert "drawn" not in draw(RunView("a run", 10))


def test_the_view_shows_what_the_watch_says_while_it_does():
    terminal = io.StringIO()
    watch = SimpleNamespace(active=[SimpleNamespace(text="length: 90 tokens a turn. Look there.")])
    view = LiveView("a run", None, Console(file=terminal, force_terminal=False, width=90), watch)
    view.on_train_begin(None, state(0), None)
    view.on_log(None, state(0), None, LOGS)
    assert "alarm: length: 90 tokens a turn. Look there." in draw(view._current())
    watch.active.clear()
    assert "alarm" not in draw(view._current())
    view.close()


def test_the_view_is_drawn_before_anything_is_known_and_in_a_narrow_terminal():
    assert "step 0/3" in draw(RunView("a run", 3))
    view = RunView("a run", 3)
    view.add(LOGS)
    assert all(len(line) <= 40 for line in draw(view, width=40).splitlines())


def test_what_is_not_of_a_training_batch_changes_nothing():
    view = RunView("a run", 3)
    view.add({"eval_reward": 1.0, "eval_success": 1.0})
    view.add({"train_runtime": 3.0})
    assert "success" not in draw(view)


def test_a_sparkline_goes_from_the_lowest_value_to_the_highest():
    assert sparkline([0, 1, 2, 7], 10) == "▁▂▃█"
    assert sparkline([3, 3], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert sparkline([0, 0, 4, 4], 2) == "▁█"  # each stands for the mean of two
    assert sparkline([0, 1], 2, ASCII_BLOCKS) == "_#"


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 60))
def test_a_sparkline_fits_its_width(values, width):
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set(BLOCKS)


def test_waiting_for_environments_is_the_part_of_the_rollout_without_generation():
    assert time_split(LOGS) == {"generate": 1.5, "environment": 0.5, "score": 0.25, "train": 1.0}


def state(step, **changes):
    settings = {"global_step": step, "max_steps": 4, "is_world_process_zero": True,
                "log_history": []}  # fmt: skip
    return SimpleNamespace(**(settings | changes))


def test_the_live_view_lets_prints_and_logs_through_and_gives_the_terminal_back(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)  # made before the view, as transformers' is
    logger = logging.getLogger("agent_trainers.test_live_view")
    monkeypatch.setattr(logger, "handlers", [handler])
    console = Console(file=terminal, force_terminal=True, width=90)
    view = LiveView("a run", SimpleNamespace(part="rollout"), console)
    view.on_train_begin(None, state(0), None)
    assert handler.stream is sys.stderr is not terminal
    logger.warning("a warning in between")
    sys.stderr.write("a line in between\n")
    view.on_step_end(None, state(1), None)
    view.on_log(None, state(1), None, logs=dict(LOGS))
    view.close()
    view.on_train_end(None, state(4), None)  # once more does no harm
    assert sys.stderr is terminal
    assert handler.stream is terminal
    shown = terminal.getvalue()
    for part in ("a warning in between", "a line in between", "step 1/4", "exact_match"):
        assert part in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_a_resumed_run_shows_the_curves_from_before(monkeypatch):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=90)
    view = LiveView("a run", console=console)
    history = [{**LOGS, "success": value, "step": i} for i, value in enumerate((0.0, 1.0), 1)]
    view.on_train_begin(None, state(2, log_history=history), None)
    view.close()
    assert "▁█" in terminal.getvalue()
    assert "step 2/4" in terminal.getvalue()


def test_other_processes_show_nothing():
    terminal = io.StringIO()
    view = LiveView("a run", console=Console(file=terminal, force_terminal=True))
    view.on_train_begin(None, state(0, is_world_process_zero=False), None)
    view.on_step_end(None, state(1), None)
    view.on_log(None, state(1), None, logs=dict(LOGS))
    view.close()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, LiveView), (False, SuccessProgress)])
def test_a_terminal_gets_the_live_view_and_everything_else_a_plain_bar(
    monkeypatch, is_terminal, kind
):
    def console(stderr):
        return Console(file=io.StringIO(), force_terminal=is_terminal, _environ={"TERM": "xterm"})

    monkeypatch.setattr(live_view, "Console", console)
    callbacks = []
    trainer = SimpleNamespace(
        clock=None,
        watch=None,
        remove_callback=lambda kind: None,
        add_callback=callbacks.append,
        callback_handler=SimpleNamespace(callbacks=callbacks),
    )
    shown = show_progress(trainer, "a run")
    assert type(shown) is kind
    assert callbacks == [shown]
    shown.close()


def test_the_plain_bar_shows_success_and_can_be_closed_twice(capsys):
    bar = SuccessProgress()
    bar.on_train_begin(None, state(0), None)
    bar.on_step_end(None, state(1), None)
    bar.on_log(None, state(1), None, logs=dict(LOGS))
    bar.close()
    bar.on_train_end(None, state(4), None)
    assert "success=0.25" in capsys.readouterr().err


def test_the_view_shows_each_of_several_environments_in_training_and_in_evaluation():
    view = RunView("a run", 3)
    for success in (0.0, 0.5):
        view.add({**LOGS, "env/hop/success": success, "env/hop/metrics/success": 0.9})
        view.add({"eval_success": 0.75, "eval_env/three/success": success / 2})
    lines = {line.strip("│ ").split("  ")[0].strip(): line for line in draw(view).splitlines()}
    assert "50.0%" in lines["hop"]
    assert "▁█" in lines["hop"]
    assert "75.0%" in lines["evaluated"]
    assert "25.0%" in lines["evaluated three"]
    assert "90.0%" not in draw(view)
