"""Gradients of merged rows compared with a row per step, and peak memory with the token budget.

The trajectories are synthetic: their context grows by a turn and an observation each step. They
take the trainer's own path to a gradient, without a rollout.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trajectory import StopReason, Trajectory, Transition
from benchmarks.performance.interleaved import StepTimer, compare, measure_interleaved
from benchmarks.performance.models import (
    ENVIRONMENT,
    SEED,
    Settings,
    load_model,
    load_tokenizer,
    quieten,
    utilisation,
)

PROMPT_TOKENS: Final = 250
"""HotpotQA's first state with the template of Qwen2.5 and one tool."""
ACTION_TOKENS: Final = 24
OBSERVATION_TOKENS: Final = 60
"""Longer observations reduce the gain of merging; see `token_ratio` in the results."""


def measure_merging(settings: Settings) -> dict[str, Any]:
    """Return the time of merged rows over that of separate rows, by number of steps."""
    return {str(n): _measure_merging(settings, n) for n in settings.num_steps}


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Return the peak memory of a step on long trajectories over that of rows that fill the budget.

    Each side runs in its own process. On a CPU the peak is the growth of the process's memory
    (``VmHWM``), on CUDA that of ``max_memory_allocated``.
    """
    sides = {
        name: functools.partial(peak_in_process, settings, num_steps)
        for name, num_steps in (("long", settings.memory_steps), ("budget", 0))
    }
    peaks = measure_interleaved(sides, max(1, settings.rounds // 2), description="memory")
    return compare(peaks["long"], peaks["budget"]) | {"unit": "bytes"}


def draw_lengths(num_steps: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw 0.5 to 1.5 times the mean lengths of what each state gains, and of each action."""
    means = [(PROMPT_TOKENS, ACTION_TOKENS), *[(OBSERVATION_TOKENS, ACTION_TOKENS)] * num_steps]
    draws = rng.uniform(0.5, 1.5, (num_steps, 2))
    return [(int(a * x), int(b * y)) for (a, b), (x, y) in zip(means, draws, strict=False)]


def make_trajectory(lengths: Sequence[tuple[int, int]], rng: np.random.Generator) -> Trajectory:
    """Return a trajectory with growing states; see `draw_lengths`."""
    state: list[int] = []
    transitions = []
    for number, (gained, written) in enumerate(lengths, start=1):
        tokens = rng.integers(8, 200, size=gained + written).tolist()  # no special tokens
        state, action = [*state, *tokens[:gained]], tokens[gained:]
        transitions.append(
            Transition(
                messages=[{"role": "user", "content": ""}], prompt_ids=state, completion_ids=action,
                logprobs=np.zeros(len(action), np.float32), action="", reward=float(rng.random()),
                reward_terms={}, terminated=number == len(lengths), truncated=False, info={},
            )
        )  # fmt: skip
        state = [*state, *action]
    return Trajectory(
        task_id="0", group_id="0", transitions=transitions, metrics={"success": 0.0},
        timings={"generate_seconds": 0.0, "environment_seconds": 0.0},
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


def peak_in_process(settings: Settings, num_steps: int) -> int:
    """Return the result of `_peak` in a separate process."""
    request = json.dumps([dataclasses.asdict(settings), num_steps])
    command = [sys.executable, "-m", "benchmarks.performance.gradients", request]
    # one heap that returns freed memory to the system, so that peaks are real
    environment = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
                   "MALLOC_TRIM_THRESHOLD_": "65536"}  # fmt: skip
    output = subprocess.run(  # noqa: S603 - this module
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ).stdout
    return int(output.splitlines()[-1])


def _peak(settings: Settings, num_steps: int) -> int:
    """Return the bytes of a step's peak; of 0 steps, for one micro-batch of the whole budget."""
    rng, budget = np.random.default_rng(SEED), settings.token_budget
    lengths = [[(PROMPT_TOKENS, budget // 4 - PROMPT_TOKENS)] for _ in range(4)]
    if num_steps:  # several micro-batches
        lengths = [draw_lengths(num_steps, rng)]
        while sum(sum(pair) for own in lengths for pair in own) < 2 * budget:
            lengths.append(draw_lengths(num_steps, rng))
    batch = [make_trajectory(own, rng) for own in lengths]
    short = [make_trajectory([(2, 2)], rng) for _ in batch]
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(settings, folder, short, merge_steps=True)
        timer = StepTimer(trainer)  # allocates gradients and the state of the optimiser
        _replay(trainer, batch)
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            timer.step()
            return torch.cuda.max_memory_allocated() - before
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        before = _process_bytes("VmRSS")
        timer.step()
        return _process_bytes("VmHWM") - before


def _process_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def _measure_merging(settings: Settings, num_steps: int) -> dict[str, Any]:
    rng = np.random.default_rng([SEED, num_steps])
    batch = [
        make_trajectory(draw_lengths(num_steps, rng), rng) for _ in range(settings.num_trajectories)
    ]
    with tempfile.TemporaryDirectory() as folder:
        merged = _make_trainer(settings, folder, batch, merge_steps=True)
        separate = _make_trainer(settings, folder, batch, merge_steps=False)
        sides = {"merged": StepTimer(merged).step, "rows": StepTimer(separate).step}
        steps = measure_interleaved(sides, settings.rounds, description="merged vs rows")
    seconds = {name: [gradient for _, gradient in timed] for name, timed in steps.items()}
    row_lengths = [
        [len(t.prompt_ids) + len(t.completion_ids) for t in trajectory.transitions]
        for trajectory in batch
    ]
    merged_tokens = sum(lengths[-1] for lengths in row_lengths)  # the last has all before it
    speed = merged_tokens / float(np.median(seconds["merged"]))
    return compare(seconds["merged"], seconds["rows"]) | {
        "model": settings.gradient_model,
        "merged_tokens": merged_tokens,
        "token_ratio": sum(map(sum, row_lengths)) / merged_tokens,
        "merged": utilisation(merged.model, speed),
    }


def _make_trainer(
    settings: Settings, folder: str, batch: Sequence[Trajectory], *, merge_steps: bool
) -> StepGRPOTrainer:
    config = StepGRPOConfig(
        output_dir=folder,
        max_steps=1,
        advantage_estimator="grpo_step",
        per_device_train_batch_size=len(batch),
        num_generations=len(batch),
        max_tokens_per_micro_batch=settings.token_budget,
        max_completion_length=24,
        max_logprob_drift=None,  # the tokens were not sampled
        learning_rate=1e-6,
        save_strategy="no",
        **settings.trainer_options,
    )
    model = load_model(settings.gradient_model, settings.device)
    trainer = StepGRPOTrainer(
        model=model, env=ENVIRONMENT, args=config, processing_class=load_tokenizer()
    )
    trainer.args.merge_steps = merge_steps
    _replay(trainer, batch)
    return trainer


def _replay(trainer: StepGRPOTrainer, batch: Sequence[Trajectory]) -> None:
    """Let every rollout of a trainer return `batch`."""
    trainer.rollouts.collectors["train"] = SimpleNamespace(
        collect=lambda *_, **__: list(batch), close=lambda: None
    )


if __name__ == "__main__":
    quieten()
    sizes, length = json.loads(sys.argv[1])
    sys.stdout.write(f"{_peak(Settings(**sizes), length)}\n")
