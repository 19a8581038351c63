"""Metrics of a run in the loggers of `report_to`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_envs import MissingExtraError
from agent_trainers.cli import train
from agent_trainers.monitoring.metrics_log import read_metrics

SHORT = ["--max_steps", "2", "--num_eval_tasks", "2", "--per_device_train_batch_size", "4",
         "--num_generations", "2", "--per_device_eval_batch_size", "2"]  # fmt: skip
SHOWN = ("reward", "success", "rewards/exact_match", "tools/calls", "entropy",
         "groups/without_variance", "time/train_seconds")  # fmt: skip
INSTALLED = [name for name in train.LOGGERS if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which a separate process has trained: these libraries start threads."""
    if not INSTALLED:
        pytest.skip("no logger is installed")
    folder = tmp_path_factory.mktemp("logged")
    command = [sys.executable, "-m", "agent_trainers.cli.train", *SHORT, "--report_to", *INSTALLED]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[3]), "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(folder / "config"), "WANDB_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    result = subprocess.run(
        [*command, "--output_dir", str(folder / "run")], capture_output=True, text=True,
        timeout=250, check=False, cwd=folder, env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture
def logged(folder):
    return {record["step"]: record for record in read_metrics(folder / "run") if "loss" in record}


def test_tensorboard_gets_every_figure_in_the_output_folder(folder, logged):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in folder.rglob("events*"):
        assert path.is_relative_to(folder / "run")
        events = EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend(events.Scalars(name))
        for name in events.Tags()["tensors"]:
            found.setdefault(name, []).extend(events.Tensors(name))
    for name in SHOWN:
        values = {event.step: event.value for event in found[f"train/{name}"]}
        assert values == pytest.approx({step: logged[step][name] for step in (1, 2)}, abs=1e-6)
    assert sorted(event.step for event in found["eval/success"]) == [0, 2]
    tables = found["trajectories/text_summary"]  # of the first and the last step
    assert [table.step for table in tables] == [1, 2]
    assert b"tool_call" in tables[0].tensor_proto.string_val[0]


def test_weights_and_biases_gets_every_figure_offline(folder):
    pytest.importorskip("wandb")
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")  # one run, not three
    data = path.read_bytes()
    assert all(f"train/{name}".encode() in data for name in SHOWN)
    assert b"eval/success" in data
    assert b"trajectories" in data


def test_a_logger_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"--report_to wandb needs wandb.*loggers"):
        train.run([*SHORT, "--report_to", "wandb", "--output_dir", str(tmp_path)])
