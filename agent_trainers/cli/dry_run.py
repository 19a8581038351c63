"""``agent-r1-train --dry_run``: one batch from the first prompt to the gradient, and no update.

The trainer runs as it always does, sampler, processes and critic included, and is stopped before
its first optimiser step; so what is shown is what a run would do, and nothing has changed.
"""

import contextlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from agent_envs.errors import ConfigurationError
from agent_trainers.monitoring.batch_record import BatchRecord
from agent_trainers.monitoring.dry_run_report import facts_table, print_dry_run
from agent_trainers.monitoring.episode_statistics import EpisodeSummary, summarise
from agent_trainers.monitoring.live_view import NUMBERS, duration
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
    choose,
    trained_samples,
)
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig

PAGE: Final = "dry_run.html"
NUM_SAMPLES: Final = 8
DRIFT, LARGEST_DRIFT, PEAK = "drift, mean", "drift, largest", "peak"


class _BatchSeenError(Exception):
    """The batch has gone through the model and back."""


class _StopBeforeUpdate(TrainerCallback):  # type: ignore[misc]
    """Stops training between the gradient and the optimiser step."""

    def __init__(self, trainer: StepGRPOTrainer) -> None:
        self._trainer = trainer
        self.seconds: Mapping[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop. Relies on: called on every process after the last backward pass of a step."""
        self.seconds = self._trainer.clock.seconds()
        raise _BatchSeenError


def prepare(config: StepGRPOConfig) -> None:
    """Change settings so that nothing is written or sent; before the trainer is made."""
    config.report_to = []
    config.disable_tqdm = True
    config.save_strategy = SaveStrategy.NO
    config.push_to_hub = False
    config.log_completions = False


def dry_run(trainer: StepGRPOTrainer, title: str, checkpoint: str | None = None) -> None:
    """Play, score and train one batch up to its gradient; print what came of it.

    `trainer` was made with settings that `prepare` has seen.

    Raises:
        ConfigurationError: If the model cannot be stopped before its update.
    """
    if trainer.is_deepspeed_enabled:
        raise ConfigurationError(
            "--dry_run does not work with DeepSpeed, which updates the weights inside the backward "
            "pass. Leave its options out for the dry run."
        )
    # Both would write over what a run in the same folder has left.
    trainer.remove_callback(MetricsLog)
    stop = _StopBeforeUpdate(trainer)
    trainer.add_callback(stop)
    trainer.begin_run(is_kept=False)
    with contextlib.suppress(_BatchSeenError):
        trainer.train(resume_from_checkpoint=checkpoint)
    record = trainer.last_batch
    assert record is not None
    new_logprobs = trainer.current_logprobs()
    episodes: list[EpisodeSummary] = gather_object([*map(summarise, record.trajectories)])
    has_signal: list[bool] = gather_object([bool(np.any(values)) for values in record.advantages])
    counts: list[dict[str, float]] = gather_object([_count(record, new_logprobs)])
    if not trainer.accelerator.is_main_process:
        return

    *chosen, shown = trained_samples(
        record,
        [*choose(record.trajectories, NUM_SAMPLES), _most_telling(record)],
        label="dry run",
        optimiser_step=trainer.state.global_step,
        new_logprobs=new_logprobs,
    )
    page = Path(trainer.args.output_dir) / PAGE
    tokenizer = trainer.processing_class
    write_trajectory_page(page, chosen, tokenizer=tokenizer, title=title)
    console = Console()
    console.rule(f"[bold]dry run: {title}", align="left")
    print_dry_run(console, record, shown, episodes, has_signal, tokenizer)
    console.print(facts_table("the batch", _figures(counts, trainer)))
    console.print(facts_table("one optimiser step", _times(trainer, stop.seconds)))
    console.print(facts_table("memory", _memory(trainer, counts)))
    console.print(f"{'trajectories':>24}: {page}", highlight=False, soft_wrap=True)
    console.print("No weights were changed and none saved.")


def _count(record: BatchRecord, new_logprobs: npt.NDArray[Any]) -> dict[str, float]:
    """Return what this process has of rows and tokens, how far it drifts, what memory it took."""
    tensors = record.tensors
    is_action = tensors["action_mask"].cpu().numpy().astype(bool)
    sampled = tensors["sampling_per_token_logps"].float().cpu().numpy()
    # vLLM gives no number for some tokens
    drift = np.nan_to_num(np.abs(new_logprobs - sampled)[is_action])
    return {
        "rows": len(record.rows),
        "padding rows": tensors["prompt_ids"].size(0) - len(record.rows),
        "steps": sum(len(t.transitions) for t in record.trajectories),
        "prompt tokens": sum(len(row.prompt_ids) for row in record.rows),
        "sampled tokens": sum(sum(row.is_action) for row in record.rows),
        "trained tokens": sum(sum(row.is_trained) for row in record.rows),
        "tokens": sum(len(row.prompt_ids) + len(row.completion_ids) for row in record.rows),
        DRIFT: float(drift.sum()),
        LARGEST_DRIFT: float(drift.max(initial=0.0)),
        PEAK: _peak_bytes(),
    }


def _figures(counts: list[dict[str, float]], trainer: StepGRPOTrainer) -> dict[str, str]:
    """Return figures of the batch over all processes, ready to print."""
    totals = {name: sum(count[name] for count in counts) for name in counts[0]}
    figures = {n: f"{total:,}" for n, total in totals.items() if isinstance(total, int)}
    del figures[PEAK]
    mean_drift = totals[DRIFT] / max(1, totals["sampled tokens"])
    figures[DRIFT] = f"{mean_drift:.2e} between sampled and recomputed log-probabilities"
    figures[LARGEST_DRIFT] = f"{max(count[LARGEST_DRIFT] for count in counts):.2e}"
    for name, label, form in (
        ("rows/padding_share", "padding share", "{:.1%}"),
        ("rows/forwarded_per_trained_token", "forwarded per trained token", "{:.2f}"),
        ("rows/tokens_per_second", "tokens per second", "{:,.0f}"),
        ("frac_reward_zero_std", "groups without signal", "{:.0%}"),
        *NUMBERS,
    ):
        values = [v for v in trainer._metrics["train"].get(name, []) if not math.isnan(v)]
        if values:
            figures[label] = form.format(sum(values) / len(values))
    return figures


def _times(trainer: StepGRPOTrainer, seconds: Mapping[str, float]) -> dict[str, str]:
    total = seconds["rollout"] + seconds["score"] + seconds["train"]
    num_processes, num_steps = trainer.accelerator.num_processes, trainer.state.max_steps
    processes = f" on {num_processes} processes" if num_processes > 1 else ""
    return {
        "generate": f"{seconds['rollout'] - seconds['wait']:.2f} s",
        "wait for environments": f"{seconds['wait']:.2f} s",
        "score": f"{seconds['score']:.2f} s",
        "forward and backward": f"{seconds['train']:.2f} s",
        "in all": f"{total:.2f} s{processes}, the optimiser's update not included; "
        f"{num_steps:,} steps would take about {duration(total * num_steps)}",
    }


def _most_telling(record: BatchRecord) -> int:
    """Return the number of the trajectory with the most rows, then the most steps."""
    num_rows = [0] * len(record.trajectories)
    for row in record.rows:
        num_rows[row.episode] += 1
    return max(
        range(len(num_rows)), key=lambda i: (num_rows[i], len(record.trajectories[i].transitions))
    )


def _memory(trainer: StepGRPOTrainer, counts: list[dict[str, float]]) -> dict[str, str]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    groups = trainer.optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    state = 2 * sum(p.numel() * p.element_size() for p in trained)
    memory = {
        "weights": _gigabytes(weights),
        "peak so far": f"{_gigabytes(max(count[PEAK] for count in counts))} in the fullest "
        "process, gradients and activations included",
    }
    if "adam" in str(trainer.args.optim).lower():
        memory["to come"] = f"about {_gigabytes(state)} for the optimiser's two moments"
    return memory


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024  # Linux counts in KiB


def _gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
