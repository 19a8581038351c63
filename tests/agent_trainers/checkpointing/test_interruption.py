"""Ctrl-C, SIGTERM and kill -9 against real processes of ``agent-r1-train``."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agent_trainers.checkpointing.checkpoints import find_checkpoint
from agent_trainers.checkpointing.interruption import (
    STOP_FILE,
    SUPERVISOR,
    Interrupted,
    StopAtStepEnd,
    StopRequests,
)

SETTINGS = [
    "--max_steps", "12", "--num_eval_tasks", "2", "--per_device_train_batch_size", "4",
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
    process = start(output, "--resume")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-2000:]
    return load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run that nobody stops."""
    output = tmp_path_factory.mktemp("whole")
    return finish(output)


def test_a_killed_and_interrupted_run_ends_where_the_whole_run_ends(tmp_path, whole):
    process = start(tmp_path)
    wait_for_step(tmp_path, process, 4)
    process.kill()
    process.communicate(timeout=60)
    process = start(tmp_path, "--resume")
    wait_for_step(tmp_path, process, 8)
    process.send_signal(signal.SIGHUP)  # the terminal was closed
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 129
    checkpoint = find_checkpoint(tmp_path).checkpoint
    assert f"saved in {checkpoint}" in errors
    assert "Resume with the same command and --resume" in errors
    assert "Traceback" not in errors
    weights = finish(tmp_path)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    assert json.loads((tmp_path / "results.json").read_text())["steps"] == 12


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


def test_a_second_interrupt_stops_at_once(tmp_path):
    code = (
        "import os, signal, time\n"
        "from agent_trainers.checkpointing.interruption import StopRequests\n"
        "with StopRequests(lambda text: print(text, flush=True)) as requests:\n"
        "    requests.can_finish_step = True\n"
        "    print('ready', flush=True)\n"
        "    while True: time.sleep(0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_signals,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "Signal again to stop at once." in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT
    process.stdout.close()


class _OneProcess:
    num_processes = 1


def test_outside_of_training_an_interrupt_stops_at_once():
    with StopRequests(lambda _: None), pytest.raises(Interrupted) as interrupted:
        signal.raise_signal(signal.SIGTERM)
    assert interrupted.value.exit_code == 143


def test_a_launchers_request_and_its_death_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    monkeypatch.setenv(SUPERVISOR, str(os.getpid()))
    callback = StopAtStepEnd(StopRequests(lambda _: None), _OneProcess())
    callback._agree()
    assert callback.stopped_by is None
    (tmp_path / "stop").write_text("2", encoding="utf-8")
    callback._agree()
    assert callback.stopped_by == signal.SIGINT
    (tmp_path / "stop").unlink()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not psutil.pid_exists(gone.pid)
    monkeypatch.setenv(SUPERVISOR, str(gone.pid))
    orphan = StopAtStepEnd(StopRequests(lambda _: None), _OneProcess())
    orphan._agree()
    assert orphan.stopped_by == signal.SIGTERM
