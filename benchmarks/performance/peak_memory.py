"""Peak memory of a training step on longer and longer trajectories, under a token budget.

The reference is a step whose batch is one micro-batch of exactly the budget. Each setting is
measured in a process of its own (``python -m benchmarks.performance.peak_memory SETTING``), at its
second step: the first, on a single short row, makes room for gradients and the optimiser. On a CPU
it is the growth of the process's memory (``VmHWM``), on CUDA that of ``max_memory_allocated``.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from agent_trainers.trajectory import Trajectory
from benchmarks.performance.comparison import compare, measure_in_turns
from benchmarks.performance.merged_rows import make_trainer
from benchmarks.performance.models import load_model, quieten
from benchmarks.performance.settings import SEED, Settings
from benchmarks.performance.synthetic_trajectories import (
    PROMPT_TOKENS,
    make_long_turn,
    make_trajectory,
    row_lengths,
)

TARGET: Final = 1.3
REFERENCE_ROWS: Final = 4
"""Rows of the micro-batch of exactly the budget."""
NUM_BUDGETS: Final = 2
"""Tokens of the trajectories, in budgets: several micro-batches, however short they are."""
# One heap, and nothing kept: what is freed goes back to the system, so that peaks are real.
_ALLOCATOR: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Return the peak over the reference's, by number of steps."""
    names = ["budget", *map(str, settings.memory_steps)]
    sides = {name: functools.partial(_in_own_process, settings, name) for name in names}
    results = measure_in_turns(sides, max(1, settings.rounds // 2), description="memory")
    return {
        name: compare(results[name], results["budget"], target=TARGET)
        | {"unit": "bytes", "model": settings.gradient_model, "budget": settings.token_budget}
        for name in names[1:]
    }


def main() -> None:
    """Measure one setting in this process; print bytes."""
    quieten()
    setting = json.loads(sys.argv[1])
    settings = Settings(**setting["settings"])
    sys.stdout.write(f"{_measure(settings, setting['name'])}\n")


def _in_own_process(settings: Settings, name: str) -> int:
    setting = json.dumps({"settings": dataclasses.asdict(settings), "name": name})
    command = [sys.executable, "-m", "benchmarks.performance.peak_memory", setting]
    output = subprocess.run(  # noqa: S603 - this very program
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **_ALLOCATOR}
    ).stdout
    return int(output.splitlines()[-1])


def _measure(settings: Settings, name: str) -> int:
    batch = _batch(settings, name)
    rng = np.random.default_rng(SEED)
    short = [make_long_turn(2, 2, rng) for _ in batch]
    peak = _StepPeak(settings.device)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(settings.gradient_model, settings.device)
        trainer = make_trainer(settings, model, folder, [short, batch], max_steps=2)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(peak)
        trainer.train()
    return peak.bytes


def _batch(settings: Settings, name: str) -> list[Trajectory]:
    rng = np.random.default_rng(SEED)
    if name != "budget":
        batch: list[Trajectory] = []
        while sum(row_lengths(one)[-1] for one in batch) < NUM_BUDGETS * settings.token_budget:
            batch.append(make_trajectory(int(name), rng))
        return batch
    action_tokens = settings.token_budget // REFERENCE_ROWS - PROMPT_TOKENS
    return [make_long_turn(PROMPT_TOKENS, action_tokens, rng) for _ in range(REFERENCE_ROWS)]


class _StepPeak(TrainerCallback):  # type: ignore[misc]
    """Measures how much memory a step takes at most beyond what was taken before it.

    The last step counts.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self.bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget earlier peaks."""
        if self._is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
            self._before = _status("VmRSS")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the peak."""
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else _status("VmHWM")
        self.bytes = peak - self._before


def _status(name: str) -> int:
    """Return a size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
