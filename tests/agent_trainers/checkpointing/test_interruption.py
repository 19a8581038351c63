"""Ctrl-C, SIGTERM and kill -9 against real processes of ``agent-r1-train``."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from agent_trainers.checkpointing.checkpoints import find_checkpoint
from agent_trainers.checkpointing.interruption import (
    SIGNALS,
    STOP_FILE,
    SUPERVISOR,
    Interrupted,
    StopRequests,
)
from agent_trainers.cli import train

SETTINGS = [
    "--max_steps", "8", "--num_eval_tasks", "2", "--per_device_train_batch_size", "4",
    "--num_generations", "4", "--per_device_eval_batch_size", "2", "--save_steps", "2",
]  # fmt: skip


def listen_to_signals():
    """Give signals their default effect, also under ``nohup`` or in a shell's background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(output, *arguments):
    """Start a run in its own session, so that its leftovers can be found."""
    command = [sys.executable, "-m", "agent_trainers.cli.train", *SETTINGS, *arguments]
    return subprocess.Popen(
        [*command, "--output_dir", str(output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_signals,
    )


def wait_for_step(output, process, step, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (output / f"checkpoint-{step}").exists():
        assert process.poll() is None, process.stderr.read()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def finish(output):
    train.run([*SETTINGS, "--output_dir", str(output), "--resume"])
    return load_file(output / "model.safetensors")


def test_a_killed_and_interrupted_run_ends_where_the_whole_run_ends(tmp_path):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    whole.mkdir()
    process = start(broken)
    wait_for_step(broken, process, 2)
    process.kill()
    process.communicate(timeout=60)
    process = start(broken, "--resume")
    wait_for_step(broken, process, 4)
    process.send_signal(signal.SIGHUP)  # the terminal was closed
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 129
    assert f"saved in {find_checkpoint(broken).checkpoint}" in errors
    assert "Resume with the same command and --resume" in errors
    assert "Traceback" not in errors
    weights, expected = finish(broken), finish(whole)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert json.loads((broken / "results.json").read_text())["steps"] == 8


def test_two_processes_stop_at_the_same_step(tmp_path):
    process = start(tmp_path, "--num_processes", "2", "--per_device_train_batch_size", "2")
    wait_for_step(tmp_path, process, 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Resume with the same command and --resume" in errors
    assert "Traceback" not in errors
    checkpoint = find_checkpoint(tmp_path).checkpoint
    states = {path.name for path in checkpoint.glob("run_state_*.pt")}
    assert states == {"run_state_0.pt", "run_state_1.pt"}


def test_a_first_interrupt_waits_for_the_step_and_a_second_one_stops_at_once():
    said = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with StopRequests(said.append) as requests:
        requests.can_finish_step = True
        signal.raise_signal(signal.SIGTERM)
        assert requests.received == signal.SIGTERM
        assert all(signal.getsignal(number) is signal.SIG_DFL for number in SIGNALS)
    assert "Signal again to stop at once." in said[0]
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_outside_of_training_an_interrupt_stops_at_once():
    with StopRequests(lambda _: None), pytest.raises(Interrupted) as interrupted:
        signal.raise_signal(signal.SIGTERM)
    assert interrupted.value.exit_code == 143


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
