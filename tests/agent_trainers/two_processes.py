"""Runs a script in two processes."""

import subprocess
import sys
from pathlib import Path


def run_in_two_processes(module, *arguments):
    """Run a module under torchrun; an error of either process fails the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    result = subprocess.run(
        [*command, "2", "-m", module.__name__, *map(str, arguments)],
        capture_output=True, text=True, timeout=250, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
