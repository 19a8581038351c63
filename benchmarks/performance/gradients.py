"""Gradients of merged rows compared with a row per step, and peak memory under a token budget.

Both use synthetic trajectories whose context grows by a turn and an observation each step, and the
trainer's own path from trajectories to a gradient. Neither includes a rollout.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trajectory import StopReason, Trajectory, Transition
from benchmarks.performance.interleaved import compare, measure_interleaved, train_interleaved
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
REFERENCE_ROWS: Final = 4
"""Rows of the memory reference: one micro-batch of exactly the budget."""
NUM_BUDGETS: Final = 2
"""Tokens of the trajectories in budgets, so that there are several micro-batches."""
# One heap that returns freed memory to the system, so that peaks are real.
_ALLOCATOR: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


class RecordedRollout:
    """A rollout that returns given batches in order, then repeats the last one."""

    def __init__(self, batches: Sequence[Sequence[Trajectory]]) -> None:
        """Set the batches."""
        self._batches, self._next = batches, 0

    def collect(self, specs: Sequence[EpisodeSpec], *_: Any, **__: Any) -> list[Trajectory]:
        """Return the next batch."""
        batch = self._batches[min(self._next, len(self._batches) - 1)]
        self._next += 1
        return list(batch)

    def close(self) -> None:
        """Close nothing."""


def measure_merging(settings: Settings) -> dict[str, Any]:
    """Return the time of merged rows over that of separate rows, by number of steps."""
    return {str(n): _measure_merging(settings, n) for n in settings.num_steps}


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Return the peak memory of a step over the reference's, by number of steps.

    Each setting runs in its own process, and its second step counts: the first, on a short row,
    allocates gradients and optimiser state. On a CPU the peak is the growth of the process's
    memory (``VmHWM``), on CUDA that of ``max_memory_allocated``.
    """
    names = ["budget", *map(str, settings.memory_steps)]
    sides = {name: partial(_peak_in_process, settings, name) for name in names}
    results = measure_interleaved(sides, max(1, settings.rounds // 2), description="memory")
    return {
        name: compare(results[name], results["budget"])
        | {"unit": "bytes", "model": settings.gradient_model, "budget": settings.token_budget}
        for name in names[1:]
    }


def make_trajectory(num_steps: int, rng: np.random.Generator) -> Trajectory:
    """Return a trajectory with growing states; parts have 0.5 to 1.5 times their mean length."""

    def draw(mean: int) -> list[int]:
        return _draw_tokens(int(rng.integers(mean // 2, mean + mean // 2 + 1)), rng)

    state, steps = draw(PROMPT_TOKENS), []
    for _ in range(num_steps):
        action = draw(ACTION_TOKENS)
        steps.append((state, action))
        state = [*state, *action, *draw(OBSERVATION_TOKENS)]
    return _trajectory(steps, rng)


def make_long_turn(prompt_tokens: int, action_tokens: int, rng: np.random.Generator) -> Trajectory:
    """Return a trajectory of one step with these lengths."""
    step = _draw_tokens(prompt_tokens, rng), _draw_tokens(action_tokens, rng)
    return _trajectory([step], rng)


def _measure_merging(settings: Settings, num_steps: int) -> dict[str, Any]:
    rng = np.random.default_rng([SEED, num_steps])
    batches = [
        [make_trajectory(num_steps, rng) for _ in range(settings.num_trajectories)]
        for _ in range(settings.rounds + 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: _make_trainer(
                settings, load_model(settings.gradient_model, settings.device), folder, batches,
                max_steps=settings.rounds + 1,
            )
            for name in ("merged", "rows")
        }  # fmt: skip
        trainers["rows"].args.merge_steps = False
        steps = train_interleaved(trainers, settings.rounds)
    seconds = {name: [step.gradient_seconds for step in timed] for name, timed in steps.items()}
    merged_tokens = [sum(_row_lengths(one)[-1] for one in batch) for batch in batches[1:]]
    row_tokens = sum(sum(_row_lengths(one)) for batch in batches[1:] for one in batch)
    speed = np.median(np.array(merged_tokens) / np.array(seconds["merged"]))
    return compare(seconds["merged"], seconds["rows"]) | {
        "model": settings.gradient_model,
        "merged_tokens": sum(merged_tokens) / settings.rounds,
        "row_tokens": row_tokens / settings.rounds,
        "token_ratio": row_tokens / sum(merged_tokens),
        "merged": utilisation(trainers["merged"].model, float(speed)),
    }


def _make_trainer(
    settings: Settings, model: Any, folder: str, batches: list[list[Trajectory]], **options: Any
) -> StepGRPOTrainer:
    config = StepGRPOConfig(
        output_dir=folder,
        advantage_estimator="grpo_step",
        per_device_train_batch_size=len(batches[0]),
        num_generations=len(batches[0]),
        max_tokens_per_micro_batch=settings.token_budget,
        max_completion_length=24,
        max_logprob_drift=None,  # the tokens were not sampled
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        **settings.trainer_options,
        **options,
    )
    trainer = StepGRPOTrainer(
        model=model, env=ENVIRONMENT, args=config, processing_class=load_tokenizer()
    )
    trainer.rollouts.collectors["train"] = RecordedRollout(batches)
    return trainer


def _row_lengths(trajectory: Trajectory) -> list[int]:
    """Return the tokens of each step's row; the last is as long as the merged row."""
    return [len(t.prompt_ids) + len(t.completion_ids) for t in trajectory.transitions]


def _draw_tokens(length: int, rng: np.random.Generator) -> list[int]:
    tokens: list[int] = rng.integers(8, 200, size=length).tolist()  # no special tokens
    return tokens


def _trajectory(steps: list[tuple[list[int], list[int]]], rng: np.random.Generator) -> Trajectory:
    transitions = [
        Transition(
            messages=[{"role": "user", "content": ""}], prompt_ids=state, completion_ids=action,
            logprobs=np.zeros(len(action), np.float32), action="", reward=float(rng.random()),
            reward_terms={}, terminated=number == len(steps), truncated=False, info={},
        )
        for number, (state, action) in enumerate(steps, start=1)
    ]  # fmt: skip
    return Trajectory(
        task_id="0", group_id="0", transitions=transitions, metrics={"success": 0.0},
        timings={"generate_seconds": 0.0, "environment_seconds": 0.0},
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


def _peak_in_process(settings: Settings, name: str) -> int:
    setting = json.dumps({"settings": dataclasses.asdict(settings), "name": name})
    command = [sys.executable, "-m", "benchmarks.performance.gradients", setting]
    output = subprocess.run(  # noqa: S603 - this module
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **_ALLOCATOR}
    ).stdout
    return int(output.splitlines()[-1])


def _peak(settings: Settings, name: str) -> int:
    rng = np.random.default_rng(SEED)
    if name == "budget":
        length = settings.token_budget // REFERENCE_ROWS - PROMPT_TOKENS
        batch = [make_long_turn(PROMPT_TOKENS, length, rng) for _ in range(REFERENCE_ROWS)]
    else:
        batch = []
        while sum(_row_lengths(one)[-1] for one in batch) < NUM_BUDGETS * settings.token_budget:
            batch.append(make_trajectory(int(name), rng))
    short = [make_long_turn(2, 2, np.random.default_rng(SEED)) for _ in batch]
    peak = _StepPeak(settings.device)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(settings.gradient_model, settings.device)
        trainer = _make_trainer(settings, model, folder, [short, batch], max_steps=2)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(peak)
        trainer.train()
    return peak.bytes


class _StepPeak(TrainerCallback):  # type: ignore[misc]
    """Peak memory of the last step above the memory before it."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self.bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reset the peak."""
        if self._is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
            self._before = _process_bytes("VmRSS")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the peak."""
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else _process_bytes("VmHWM")
        self.bytes = peak - self._before


def _process_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    quieten()
    request = json.loads(sys.argv[1])
    sys.stdout.write(f"{_peak(Settings(**request['settings']), request['name'])}\n")
