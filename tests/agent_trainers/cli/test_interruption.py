"""Ctrl-C, SIGTERM and kill -9 against real processes of ``agent-r1-train``."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from agent_trainers.checkpointing.checkpoints import find_checkpoint
from agent_trainers.cli import launch, train
from agent_trainers.cli.launch import SIGNALS, STOP_FILE, SUPERVISOR, Interrupted, StopRequests

SETTINGS = [
    "--max_steps", "4", "--num_eval_tasks", "2", "--per_device_train_batch_size", "4",
    "--num_generations", "4", "--per_device_eval_batch_size", "2", "--save_steps", "1",
]  # fmt: skip


def listen_to_signals():
    """Give signals their default effect, also under ``nohup`` or in a shell's background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def stop_after_a_checkpoint(output, number, *arguments):
    """Start a run, send it a signal, and return its exit code and what it said."""
    command = [sys.executable, "-m", "agent_trainers.cli.train", *SETTINGS, *arguments]
    process = subprocess.Popen(
        [*command, "--output_dir", str(output)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=listen_to_signals,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (output / "checkpoint-1").exists():
        assert process.poll() is None, process.stderr.read()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


def test_a_killed_run_ends_where_the_whole_run_ends(tmp_path):
    (tmp_path / "whole").mkdir()
    stop_after_a_checkpoint(tmp_path / "broken", signal.SIGKILL)
    weights = []
    for name in ("broken", "whole"):
        train.run([*SETTINGS, "--output_dir", str(tmp_path / name), "--resume"])
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert json.loads((tmp_path / "broken" / "results.json").read_text())["steps"] == 4


def test_two_processes_stop_at_the_same_step(tmp_path):
    layout = ("--num_processes", "2", "--per_device_train_batch_size", "2", "--num_eval_tasks", "0")
    code, errors = stop_after_a_checkpoint(tmp_path, signal.SIGINT, *layout)
    assert code == 130
    checkpoint = find_checkpoint(tmp_path)[0]
    assert f"saved in {checkpoint}" in errors
    assert "Resume with the same command and --resume" in errors
    assert "Traceback" not in errors
    states = {path.name for path in checkpoint.glob("run_state_*.pt")}
    assert states == {"run_state_0.pt", "run_state_1.pt"}


def test_a_first_interrupt_waits_for_the_step_and_a_second_one_stops_at_once():
    said = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with StopRequests(said.append) as requests:
        requests.can_finish_step = True
        signal.raise_signal(signal.SIGTERM)
        assert requests.received == signal.SIGTERM
        for number, handler in before.items():  # an ignored signal stays ignored (nohup)
            expected = signal.SIG_IGN if handler is signal.SIG_IGN else signal.SIG_DFL
            assert signal.getsignal(number) is expected
    assert "Signal again to stop at once." in said[0]
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_outside_of_training_an_interrupt_stops_at_once(number, code):
    before = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored
    with StopRequests(lambda _: None), pytest.raises(Interrupted) as interrupted:
        signal.raise_signal(number)
    signal.signal(number, before)
    assert interrupted.value.exit_code == code


def test_a_launchers_request_and_its_death_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    monkeypatch.setenv(SUPERVISOR, str(os.getpid()))
    assert StopRequests(print).received is None
    (tmp_path / "stop").write_text("2", encoding="utf-8")
    assert StopRequests(print).received == signal.SIGINT
    (tmp_path / "stop").unlink()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv(SUPERVISOR, str(gone.pid))
    assert StopRequests(print).received == signal.SIGTERM


def test_an_evaluation_outside_training_stops_at_once_in_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    monkeypatch.setenv(SUPERVISOR, str(os.getpid()))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(launch, "PartialState", lambda: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(launch, "gather", lambda tensor: tensor)
    requests = StopRequests(print)
    requests.on_prediction_step(None, None, None)
    (tmp_path / "stop").write_text("15", encoding="utf-8")
    requests.can_finish_step = True
    requests.on_prediction_step(None, None, None)  # training ends with the step
    requests.can_finish_step = False
    with pytest.raises(Interrupted):
        StopRequests(print).on_prediction_step(None, None, None)
