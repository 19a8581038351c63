import io
import logging
import sys
import types
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import TrainerCallback

from agent_trainers.monitoring import live_view
from agent_trainers.monitoring.live_view import (
    LiveView,
    PlainProgress,
    show_in_notebook,
    show_progress,
    sparkline,
)

LOGS = {"reward": 0.5, "success": 0.25, "rewards/exact_match": 0.4, "loss": 0.125, "entropy": 0.3,
        "time/rollout_seconds": 2.0, "time/wait_seconds": 0.5, "time/score_seconds": 0.25,
        "time/train_seconds": 1.0, "actions/bad_json": 0.03, "episodes/timeout": 0.0,
        "actions/invalid": 0.03, "tools/failures": 0.02, "epoch": None}  # fmt: skip


class Trainer:
    """The attributes of a trainer that the views use."""

    def __init__(self, *callbacks, disable_tqdm=False):
        self.clock = SimpleNamespace(part="rollout")
        alarms = {"length": "length: 90 tokens a turn."}
        self.extensions = [SimpleNamespace(active_alarms=lambda: alarms)]
        self.callbacks = list(callbacks)
        self.args = SimpleNamespace(disable_tqdm=disable_tqdm)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def remove_callback(self, kind):
        self.callbacks = [c for c in self.callbacks if not isinstance(c, kind)]


def draw(view, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view)
    return console.file.getvalue()


def test_a_title_is_no_markup():
    assert "grpo on [/x]" in draw(LiveView("grpo on [/x]", Trainer()))


def state(step, **changes):
    settings = {"global_step": step, "max_steps": 4, "is_world_process_zero": True,
                "log_history": []}  # fmt: skip
    return SimpleNamespace(**(settings | changes))


def open_view(terminal, step=0, **changes):
    view = LiveView("a run", Trainer(), Console(file=terminal, force_terminal=True, width=90))
    view.on_train_begin(None, state(step, **changes), None)
    return view


def test_the_view_shows_curves_terms_time_and_failures():
    view = LiveView("a run")
    assert "step 0/0" in draw(view)  # before anything is known
    view.add({"eval_reward": 1.0, "eval_success": 1.0, "train_runtime": 3.0})
    assert "0.5 s a step" not in draw(view)  # not of a training batch
    view.add({**LOGS, "success": 0.0})
    view.add({**LOGS, "curriculum/level": 2.0, "groups/extra": 3.0})
    shown = draw(view)
    for part in ("a run", "success", "25.0%", "▁█", "exact_match", "+0.400", "entropy 0.300",
                 "3.25 s a step", "generate 1.50", "environment 0.50", "train 1.00",
                 "bad_json 3.0%", "tool failures 2.0%",
                 "level 2", "extra groups 3"):  # fmt: skip
        assert part in shown
    for absent in ("timeout", "invalid"):  # there were none
        assert absent not in shown
    assert all(len(line) <= 40 for line in draw(view, width=40).splitlines())


def test_the_view_shows_each_of_several_environments_in_training_and_in_evaluation():
    view = LiveView("a run")
    for success in (0.0, 0.5):
        view.add({**LOGS, "env/hop/success": success, "env/hop/metrics/success": 0.9})
        view.add({"eval_success": 0.75, "eval_env/three/success": success / 2})
    lines = {line.strip("│ ").split("  ")[0].strip(): line for line in draw(view).splitlines()}
    assert "50.0%" in lines["hop"]
    assert "▁█" in lines["hop"]
    assert "75.0%" in lines["evaluated"]
    assert "25.0%" in lines["evaluated three"]
    assert "90.0%" not in draw(view)


def test_a_sparkline_goes_from_the_lowest_value_to_the_highest():
    assert [sparkline(values, 10) for values in ([0, 1, 2, 7], [3, 3], [])] == ["▁▂▃█", "▁▁", ""]
    assert sparkline([0, 0, 4, 4], 2) == "▁█"  # each stands for the mean of two


def test_prints_and_logs_appear_above_the_view_and_the_terminal_is_restored(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)  # made before the view, as transformers' is
    logger = logging.getLogger("agent_trainers.test_live_view")
    monkeypatch.setattr(logger, "handlers", [handler])
    view = open_view(terminal)
    assert handler.stream is sys.stderr is not terminal
    logger.warning("a warning in between")
    sys.stderr.write("a line in between\n")
    view.on_step_end(None, state(1), None)
    view.on_log(None, state(1), None, logs=dict(LOGS))
    assert "generating episodes" in draw(view)
    view.close()
    view.on_train_end(None, state(4), None)  # once more does no harm
    assert sys.stderr is terminal
    assert handler.stream is terminal
    shown = terminal.getvalue()
    for part in ("a warning in between", "a line in between", "step 1/4", "exact_match",
                 "alarm: length: 90 tokens a turn."):  # fmt: skip
        assert part in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_a_resumed_run_shows_earlier_curves_and_other_processes_show_nothing():
    terminal, silent = io.StringIO(), io.StringIO()
    history = [{**LOGS, "success": value, "step": i} for i, value in enumerate((0.0, 1.0), 1)]
    open_view(terminal, step=2, log_history=history).close()
    assert "▁█" in terminal.getvalue()
    assert "step 2/4" in terminal.getvalue()
    view = open_view(silent, is_world_process_zero=False)
    view.on_log(None, state(1), None, logs=dict(LOGS))
    view.close()
    assert silent.getvalue() == ""


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, LiveView), (False, PlainProgress)])
def test_a_terminal_gets_the_live_view_and_everything_else_lines(
    monkeypatch, capsys, is_terminal, kind
):
    def console(stderr):
        return Console(file=io.StringIO(), force_terminal=is_terminal, _environ={"TERM": "xterm"})

    monkeypatch.setattr(live_view, "Console", console)
    trainer = Trainer()
    shown = show_progress(trainer, "a run")
    assert type(shown) is kind
    assert trainer.callbacks == [shown]
    if not is_terminal:
        shown.on_train_begin(None, state(0), None)
        shown.on_step_end(None, state(1), None)
        shown.on_log(None, state(1), None, logs=dict(LOGS))
        shown.on_train_end(None, state(4), None)
        assert capsys.readouterr().err.startswith("step 1/4: success 0.250, return 0.500")
    shown.close()


def test_a_command_of_a_notebook_prints_lines_although_it_has_a_terminal(monkeypatch):
    # IPython runs ! in a pseudo-terminal, and the notebook appends each frame of a live view.
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(live_view, "Console", lambda stderr: terminal)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert isinstance(show_progress(Trainer(), "a run"), PlainProgress)


def test_a_notebook_shows_the_view_instead_of_transformers_table(monkeypatch):
    class NotebookTable(TrainerCallback):
        pass

    shown = []

    def display(thing, display_id):
        shown.append(thing)
        return SimpleNamespace(update=shown.append)

    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(live_view, "DEFAULT_PROGRESS_CALLBACK", NotebookTable)
    for is_notebook, is_off, kind in (
        (False, False, NotebookTable),
        (True, True, NotebookTable),
        (True, False, LiveView),
    ):
        monkeypatch.setattr(live_view, "is_in_notebook", lambda: is_notebook)  # noqa: B023
        trainer = Trainer(NotebookTable(), disable_tqdm=is_off)
        show_in_notebook(trainer)
        assert [type(callback) for callback in trainer.callbacks] == [kind]
    view = show_progress(trainer, "agent-r1-train, called from a notebook")
    assert trainer.callbacks == [view]
    view.on_train_begin(None, state(0), None)
    view.on_log(None, state(1), None, dict(LOGS))
    view.on_train_end(None, state(4), None)
    assert shown == [view] * 3
    assert "exact_match" in view._repr_mimebundle_([], [])["text/html"]
