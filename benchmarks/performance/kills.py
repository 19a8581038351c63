"""Kill asynchronous runs at random moments: ``python -m benchmarks.performance.kills``.

Each run is killed (SIGKILL) and resumed from its newest checkpoint until it ends. Its trained
episodes are compared with those of a run that was not killed: none may be lost or trained twice.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import TrainerCallback

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_trainers import TINY_POLICY
from agent_trainers.checkpointing.checkpoints import find_checkpoint
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from benchmarks.performance.async_rollouts import make_slow_env, some_slow
from benchmarks.performance.models import SEED, quieten

STEPS: Final = 40
"""Optimiser steps of a run."""
LONGEST: Final = 6.0
"""Largest number of seconds from the start of training to a kill."""
LOG: Final = "trained.jsonl"


class _Trained(TrainerCallback):  # type: ignore[misc]
    """Appends the episodes of each optimiser step to a file."""

    def __init__(self, trainer: StepGRPOTrainer, path: Path) -> None:
        self._trainer, self._path = trainer, path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trained = self._trainer.trajectories["train"]
        episodes = [[t.group_id, t.task, t.seed] for t in trained]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "episodes": episodes}) + "\n")


def train(folder: Path, kill_after: float | None = None) -> bool:
    """Train in another process; return whether it was killed, after these seconds of training."""
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            text = (folder / "output.txt").read_text(encoding="utf-8")
            raise RuntimeError(f"The run failed:\n{text[-2000:]}")
        return os.WIFSIGNALED(status)
    try:
        _train(folder, kill_after)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - this process must not continue as its parent
        traceback.print_exc()
        os._exit(1)


def _train(folder: Path, kill_after: float | None) -> None:
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    config = StepGRPOConfig(
        output_dir=str(folder), rollout="async", max_staleness=2, max_steps=STEPS, seed=SEED,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=24,
        learning_rate=1e-4, use_cpu=True, save_steps=1, save_total_limit=2, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    waits = some_slow(0.05, np.random.default_rng())  # no run repeats the times of another
    trainer = StepGRPOTrainer(str(TINY_POLICY), lambda: make_slow_env(waits), config)
    trainer.add_callback(_Trained(trainer, folder / LOG))
    if kill_after is not None:
        signal.setitimer(signal.ITIMER_REAL, kill_after)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, as SIGKILL does
    trainer.train(resume_from_checkpoint=find_checkpoint(folder)[0] is not None)


def trained_episodes(folder: Path) -> list[Any]:
    """Return the episodes of each step of the run that survived; a resumed run repeats steps."""
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    kept: list[Any] = []
    for record in map(json.loads, lines):
        if record["step"] > len(kept):
            raise AssertionError(f"{folder}: step {record['step']} follows step {len(kept) - 1}.")
        kept[record["step"] :] = [record["episodes"]]
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=positive_int, default=100)
    options = parser.parse_args(arguments)
    quieten()
    rng = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as root:
        whole = Path(root, "whole")
        whole.mkdir()
        train(whole)
        expected = trained_episodes(whole)
        num_kills = num_runs = num_wrong = 0
        while num_kills < options.kills:
            folder = Path(root, str(num_runs))
            folder.mkdir()
            while find_checkpoint(folder)[0] != folder / f"checkpoint-{STEPS}":
                is_last = num_kills == options.kills
                num_kills += train(folder, None if is_last else float(rng.uniform(0, LONGEST)))
            num_wrong += trained_episodes(folder) != expected
            num_runs += 1
    sys.stdout.write(
        f"{num_kills} kills in {num_runs} runs of {len(expected)} steps: {num_wrong} runs with "
        "lost or repeated episodes\n"
    )


if __name__ == "__main__":
    main()
