import os
import signal
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError
from benchmarks.grid import CommandFailedError, Grid, running_cells


def test_a_stopped_grid_resumes_with_the_missing_and_the_changed_cells(tmp_path):
    computed = []

    def compute(key, spec):
        if key == "c":
            raise KeyboardInterrupt
        computed.append(key)
        return {"double": 2 * spec}

    cells = {"a": 1, "b": 2, "c": 3}
    with Grid(tmp_path) as grid:
        with pytest.raises(KeyboardInterrupt):
            grid.run(cells, compute)
        with (tmp_path / "results.jsonl").open("a") as file:
            file.write('{"key": "c", "resul')  # cut off by a crash
        results = grid.run(cells | {"c": 0, "b": 5}, lambda key, spec: computed.append(key) or {})
    assert computed == ["a", "b", "b", "c"]
    assert results == {"a": {"double": 2}, "b": {}, "c": {}}


def test_a_grid_needs_a_job(tmp_path):
    with Grid(tmp_path) as grid, pytest.raises(ConfigurationError, match="at least 1, not 0"):
        grid.run({"a": 1}, lambda key, spec: {}, jobs=0)


def invert(spec, folder):
    return {"inverse": 1 / spec["number"]}


def test_a_cell_that_raises_fails_alone(tmp_path):
    cells = {"a": {"number": 1}, "b": {"number": 0}, "c": {"number": 2}}
    failed = pytest.raises(CommandFailedError, match="failed cells: b")
    with running_cells(str(tmp_path), 1, invert) as compute, failed:
        compute(cells)
    assert Grid(tmp_path).stored().keys() == {"a", "c"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_failed_cells_are_named_after_all_others_are_done(tmp_path, jobs):
    def compute(key, spec):
        command = ["python", "-c", f"print('too bad'); exit({spec})"]
        return {"seconds": grid.command(command, tmp_path / key)}

    with Grid(tmp_path) as grid:
        with pytest.raises(CommandFailedError, match="failed cells: a"):
            grid.run({"a": 3, "b": 0}, compute, jobs=jobs)
        assert list(grid.stored()) == ["b"]
        with pytest.raises(CommandFailedError, match=r"(?s)exited with 3; .*log\.txt:.*too bad"):
            compute("a", 3)


def test_other_settings_and_a_second_call_are_refused(tmp_path):
    in_use = pytest.raises(ConfigurationError, match="in use by another call")
    with Grid(tmp_path, {"budget": 4}), in_use:
        Grid(tmp_path, {"budget": 4}).__enter__()
    with pytest.raises(ConfigurationError, match=r"other settings \(budget: 4 -> 8\)"):
        Grid(tmp_path, {"budget": 8}).__enter__()


def test_a_command_that_survives_a_killed_call_keeps_the_folder_locked(tmp_path):
    leave_a_process = (
        "import subprocess, pathlib, sys\n"
        "left = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(left.pid))\n"
    )
    with Grid(tmp_path) as grid:
        grid.command(["python", "-c", leave_a_process, str(tmp_path / "pid")], tmp_path)
    with pytest.raises(ConfigurationError, match="a killed call left behind"):
        Grid(tmp_path).__enter__()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_running_command_may_save_before_the_grid_stops(tmp_path):
    command = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    with Grid(tmp_path) as grid, pytest.raises(KeyboardInterrupt):
        grid.run({"a": 1}, lambda *_: {"s": grid.command(["python", "-c", command], tmp_path)})
    assert "saved" in Path(tmp_path / "log.txt").read_text()
