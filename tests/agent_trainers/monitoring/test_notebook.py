import sys
import types
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from agent_trainers.monitoring import notebook
from agent_trainers.monitoring.live_view import show_progress
from agent_trainers.monitoring.notebook import NotebookView, RunPicture, show_in_notebook

HISTORY = [{"step": 1, "reward": 0.25, "success": 0.125, "entropy": 0.5, "loss": float("nan")}]
CODE = """
import gymnasium as gym
import agent_envs
from agent_trainers import TINY_POLICY, StepGRPOConfig, StepGRPOTrainer
args = StepGRPOConfig("run", max_steps=1, per_device_train_batch_size=8, max_completion_length=24,
                      logging_steps=1, report_to="none", save_strategy="no")
trainer = StepGRPOTrainer(str(TINY_POLICY), "AgentR1/SyntheticMultiHop-v0", args)
trainer.train();
"""


class Display:
    """IPython's display, as far as it is used: keeps what is shown."""

    def __init__(self):
        self.shown = []

    def display(self, thing, display_id=False):
        self.shown.append(thing)
        return types.SimpleNamespace(update=self.shown.append) if display_id else None

    def HTML(self, text):
        return text


@pytest.fixture
def display(monkeypatch):
    fake = Display()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    sys.modules["IPython"].display = fake
    return fake


def test_the_picture_shows_the_curve_and_the_newest_figures():
    shown = RunPicture(HISTORY)._repr_html_()
    assert "data:image/png;base64,iVBOR" in shown
    for part in ("success <b>12.5%</b>", "return <b>+0.250</b>", "entropy <b>0.500</b>"):
        assert part in shown
    assert "No batch" in RunPicture([{"eval_reward": 1.0}])._repr_html_()


class Trainer:
    """What of a trainer is looked at."""

    def __init__(self, *callbacks, disable_tqdm=False):
        self.callback_handler = types.SimpleNamespace(callbacks=list(callbacks))
        self.args = types.SimpleNamespace(disable_tqdm=disable_tqdm)
        self.last_batch = None

    def add_callback(self, callback):
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, kind):
        kept = [c for c in self.callback_handler.callbacks if not isinstance(c, kind)]
        self.callback_handler.callbacks = kept


def test_the_picture_follows_the_run(display, monkeypatch):
    monkeypatch.setattr(notebook, "SECONDS_BETWEEN_PICTURES", -1.0)
    view = NotebookView(Trainer())
    state, control = TrainerState(max_steps=2, is_world_process_zero=True), TrainerControl()
    view.on_train_begin(None, state, control)
    state.log_history += HISTORY
    view.on_log(None, state, control, HISTORY[0])
    view.on_train_end(None, state, control)
    assert len(display.shown) == 3  # as it began, with the log, and at the end
    assert "12.5%" in display.shown[-1]._repr_html_()


def test_transformers_own_table_gives_way_in_a_notebook_and_only_there(display, monkeypatch):
    class NotebookProgressCallback(TrainerCallback):
        pass

    monkeypatch.setattr(notebook, "DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)

    def shows(trainer):
        show_in_notebook(trainer)
        return [type(callback) for callback in trainer.callback_handler.callbacks]

    assert shows(Trainer(NotebookProgressCallback())) == [NotebookProgressCallback]  # a terminal
    monkeypatch.setattr(notebook, "is_in_notebook", lambda: True)
    trainer = Trainer(NotebookProgressCallback())
    assert shows(trainer) == [NotebookView]
    assert shows(Trainer(disable_tqdm=True)) == []
    view = show_progress(trainer, "the launcher, called from a notebook")
    assert [view] == trainer.callback_handler.callbacks
    view.close()


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
    assert "success <b>" in pages[0]
    assert "Training Loss" not in "".join(pages)
    assert "<iframe srcdoc=" in pages[1]
