import io
import logging
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import TrainerCallback

from agent_trainers.monitoring import live_view
from agent_trainers.monitoring.live_view import (
    ASCII_BLOCKS,
    BLOCKS,
    LiveView,
    NotebookView,
    PlainProgress,
    RunView,
    show_in_notebook,
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


def state(step, **changes):
    settings = {"global_step": step, "max_steps": 4, "is_world_process_zero": True,
                "log_history": []}  # fmt: skip
    return SimpleNamespace(**(settings | changes))


def open_view(terminal, step=0, alarms=list, clock=None, **changes):
    console = Console(file=terminal, force_terminal=True, width=90)
    view = LiveView("a run", clock, alarms, console)
    view.on_train_begin(None, state(step, **changes), None)
    return view


def test_the_view_shows_step_curves_terms_time_and_failures():
    view = RunView("a run", 10)
    assert "step 0/10" in draw(view)  # before anything is known
    shares = {"curriculum/share/hops=1": 0.2, "curriculum/share/hops=2": 0.8,
              "curriculum/share/hops=3": 0.0}  # fmt: skip
    view.add({"eval_reward": 1.0, "eval_success": 1.0, "train_runtime": 3.0})
    assert "0.5 s a step" not in draw(view)  # not of a training batch
    view.add({**LOGS, "success": 0.0})
    view.add({**LOGS, **shares, "curriculum/level": 2.0, "groups/extra": 3.0})
    view.step, view.seconds_left = 4, 75.0
    shown = draw(view)
    for part in ("a run", "step 4/10", "1:15 left", "success", "25.0%", "▁█", "exact_match",
                 "+0.400", "entropy 0.300", "3.25 s a step", "generate 1.50", "environment 0.50",
                 "train 1.00", "bad_json 3.0%", "tool failures 2.0%",
                 "drawn  hops=2 80%   hops=1 20%", "level 2", "extra groups 3"):  # fmt: skip
        assert part in shown
    for absent in ("timeout", "invalid", "hops=3"):  # there were none
        assert absent not in shown
    assert all(len(line) <= 40 for line in draw(view, width=40).splitlines())


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


def test_prints_and_logs_appear_above_the_view_and_the_terminal_is_restored(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)  # made before the view, as transformers' is
    logger = logging.getLogger("agent_trainers.test_live_view")
    monkeypatch.setattr(logger, "handlers", [handler])
    alarms = ["length: 90 tokens a turn."]
    view = open_view(terminal, alarms=lambda: alarms, clock=SimpleNamespace(part="rollout"))
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
    for part in ("a warning in between", "a line in between", "step 1/4", "exact_match",
                 "alarm: length: 90 tokens a turn."):  # fmt: skip
        assert part in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_a_resumed_run_shows_earlier_curves_and_other_processes_show_nothing():
    terminal = io.StringIO()
    history = [{**LOGS, "success": value, "step": i} for i, value in enumerate((0.0, 1.0), 1)]
    open_view(terminal, step=2, log_history=history).close()
    assert "▁█" in terminal.getvalue()
    assert "step 2/4" in terminal.getvalue()
    silent = io.StringIO()
    view = open_view(silent, is_world_process_zero=False)
    view.on_step_end(None, state(1), None)
    view.on_log(None, state(1), None, logs=dict(LOGS))
    view.close()
    assert silent.getvalue() == ""


class Trainer:
    """The attributes of a trainer that the views use."""

    clock = last_batch = None

    def __init__(self, *callbacks, disable_tqdm=False):
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))
        self.args = SimpleNamespace(disable_tqdm=disable_tqdm)

    def add_callback(self, callback):
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, kind):
        kept = [c for c in self.callback_handler.callbacks if not isinstance(c, kind)]
        self.callback_handler.callbacks = kept


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, LiveView), (False, PlainProgress)])
def test_a_terminal_gets_the_live_view_and_everything_else_a_plain_bar(
    monkeypatch, is_terminal, kind
):
    def console(stderr):
        return Console(file=io.StringIO(), force_terminal=is_terminal, _environ={"TERM": "xterm"})

    monkeypatch.setattr(live_view, "Console", console)
    trainer = Trainer()
    shown = show_progress(trainer, "a run")
    assert type(shown) is kind
    assert trainer.callback_handler.callbacks == [shown]
    shown.close()


def test_the_plain_bar_shows_success_and_can_be_closed_twice(capsys):
    bar = PlainProgress()
    bar.on_train_begin(None, state(0), None)
    bar.on_step_end(None, state(1), None)
    bar.on_log(None, state(1), None, logs=dict(LOGS))
    bar.close()
    bar.on_train_end(None, state(4), None)
    assert "success=0.25" in capsys.readouterr().err


def test_a_notebook_shows_the_view_instead_of_transformers_table(monkeypatch):
    class NotebookTable(TrainerCallback):
        pass

    shown = []
    display = SimpleNamespace(
        HTML=str,
        display=lambda thing, display_id=False: (
            shown.append(thing) or SimpleNamespace(update=shown.append)
        ),
    )
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(live_view, "DEFAULT_PROGRESS_CALLBACK", NotebookTable)
    monkeypatch.setattr(live_view, "SECONDS_BETWEEN_UPDATES", -1.0)

    def callbacks(trainer):
        show_in_notebook(trainer)
        return [type(callback) for callback in trainer.callback_handler.callbacks]

    assert callbacks(Trainer(NotebookTable())) == [NotebookTable]  # a terminal
    monkeypatch.setattr(live_view, "is_in_notebook", lambda: True)
    assert callbacks(Trainer(NotebookTable(), disable_tqdm=True)) == [NotebookTable]
    trainer = Trainer(NotebookTable())
    assert callbacks(trainer) == [NotebookView]
    view = show_progress(trainer, "agent-r1-train, called from a notebook")
    assert [view] == trainer.callback_handler.callbacks
    view.on_train_begin(None, state(0), None)
    view.on_log(None, state(1), None, dict(LOGS))
    assert len(shown) == 2
    assert "25.0%" in draw(shown[-1])
    assert "exact_match" in shown[-1]._repr_mimebundle_([], [])["text/html"]
    view.on_train_end(None, state(4), None)
    assert len(shown) == 3


CODE = """
import gymnasium as gym
import agent_envs
from agent_trainers import TINY_POLICY, StepGRPOConfig, StepGRPOTrainer
args = StepGRPOConfig("run", max_steps=1, per_device_train_batch_size=8, max_completion_length=24,
                      logging_steps=1, report_to="none", save_strategy="no")
trainer = StepGRPOTrainer(str(TINY_POLICY), "AgentR1/SyntheticMultiHop-v0", args)
trainer.train();
"""


def test_a_trainer_shows_itself_in_a_real_notebook(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    cell = nbformat.v4.new_code_cell(CODE)
    nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=[cell]), timeout=250, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()  # fmt: skip
    pages = [output.data["text/html"] for output in cell.outputs if "data" in output]
    assert "success" in pages[0]
    assert "Training Loss" not in "".join(pages)
    assert "<iframe srcdoc=" in pages[1]
