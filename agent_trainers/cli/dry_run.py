"""``agent-r1-train --dry_run``: one batch from the first prompt to the gradient, and no update.

The trainer runs as it always does, sampler, processes and critic included, and is stopped before
its first optimiser step; so what is shown is what a run would do, and nothing has changed.
"""

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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
from agent_trainers.monitoring.dry_run_report import DryRun, EpisodeLine, print_dry_run
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import choose, trained_samples
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig

PAGE: Final = "dry_run.html"
NUM_SAMPLES: Final = 8


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

    Args:
        trainer: Made with settings that `prepare` has seen.
        title: What runs.
        checkpoint: Where to begin; None for the model as it is.

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
    facts: list[_Facts] = gather_object([_facts(trainer, record, new_logprobs)])
    if not trainer.accelerator.is_main_process:
        return
    samples = trained_samples(
        record,
        choose(record.trajectories, NUM_SAMPLES),
        label="dry run",
        optimiser_step=trainer.state.global_step,
        new_logprobs=new_logprobs,
    )
    page = Path(trainer.args.output_dir) / PAGE
    write_trajectory_page(page, samples, tokenizer=trainer.processing_class, title=title)
    shown = _most_telling(record)
    result = DryRun(
        title=title,
        num_processes=trainer.accelerator.num_processes,
        max_steps=trainer.state.max_steps,
        episodes=[line for fact in facts for line in fact.episodes],
        rows=record.rows,
        sample=trained_samples(
            record, [shown], label="", optimiser_step=0, new_logprobs=new_logprobs
        )[0],
        sample_number=shown,
        advantages=record.tensors["advantages"].float().cpu().numpy(),
        figures=_figures(facts, trainer),
        seconds=stop.seconds,
        memory=_memory(trainer, facts),
        page=page,
    )
    print_dry_run(result, Console(), trainer.processing_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What one process has to say."""

    episodes: list[EpisodeLine]
    """Its episodes."""
    tokens: dict[str, int]
    """Rows and tokens, by kind."""
    drift_sum: float
    """Sum of what recomputed log-probabilities differ from sampled ones, over sampled tokens."""
    drift_max: float
    """The largest difference."""
    peak_bytes: int
    """The most memory it has held."""


def _facts(trainer: StepGRPOTrainer, record: BatchRecord, new_logprobs: npt.NDArray[Any]) -> _Facts:
    tensors = record.tensors
    is_action = tensors["action_mask"].cpu().numpy().astype(bool)
    sampled = tensors["sampling_per_token_logps"].float().cpu().numpy()
    # vLLM gives no number for some tokens
    drift = np.nan_to_num(np.abs(new_logprobs - sampled)[is_action])
    advantages = trainer.advantages["train"]
    return _Facts(
        episodes=[
            EpisodeLine(
                group_id=t.group_id,
                task_id=t.task_id,
                return_=t.return_,
                success=t.success,
                is_scorable=t.is_scorable,
                num_steps=len(t.transitions),
                has_signal=bool(np.any(advantages[i])),
            )
            for i, t in enumerate(record.trajectories)
        ],
        tokens={
            "rows": len(record.rows),
            "padding rows": tensors["prompt_ids"].size(0) - len(record.rows),
            "steps": sum(len(t.transitions) for t in record.trajectories),
            "prompt tokens": sum(len(row.prompt_ids) for row in record.rows),
            "sampled tokens": sum(sum(row.is_action) for row in record.rows),
            "trained tokens": sum(sum(row.is_trained) for row in record.rows),
            "tokens": sum(len(row.prompt_ids) + len(row.completion_ids) for row in record.rows),
        },
        drift_sum=float(drift.sum()),
        drift_max=float(drift.max(initial=0.0)),
        peak_bytes=_peak_bytes(),
    )


def _figures(facts: list[_Facts], trainer: StepGRPOTrainer) -> dict[str, str]:
    """Return figures of the batch over all processes, ready to print."""
    totals = {name: sum(fact.tokens[name] for fact in facts) for name in facts[0].tokens}
    figures = {name: f"{count:,}" for name, count in totals.items()}
    num_sampled = max(1, totals["sampled tokens"])
    mean_drift = sum(fact.drift_sum for fact in facts) / num_sampled
    figures["drift, mean"] = f"{mean_drift:.2e} between sampled and recomputed log-probabilities"
    figures["drift, largest"] = f"{max(fact.drift_max for fact in facts):.2e}"
    for name, label, form in (
        ("rows/padding_share", "padding share", "{:.1%}"),
        ("rows/forwarded_per_trained_token", "forwarded per trained token", "{:.2f}"),
        ("rows/tokens_per_second", "tokens per second", "{:,.0f}"),
        ("frac_reward_zero_std", "groups without signal", "{:.0%}"),
        ("groups/without_variance", "groups without variance", "{:.0%}"),
        ("entropy", "entropy", "{:.3f}"),
        ("kl", "KL to the reference", "{:.4f}"),
        ("clip_ratio/region_mean", "clipped tokens", "{:.2%}"),
        ("critic/explained_variance", "critic explains", "{:.1%}"),
    ):
        values = [v for v in trainer._metrics["train"].get(name, []) if not math.isnan(v)]
        if values:
            figures[label] = form.format(sum(values) / len(values))
    return figures


def _most_telling(record: BatchRecord) -> int:
    """Return the number of the trajectory with the most rows, then the most steps."""
    num_rows = [0] * len(record.trajectories)
    for row in record.rows:
        num_rows[row.episode] += 1
    return max(
        range(len(num_rows)), key=lambda i: (num_rows[i], len(record.trajectories[i].transitions))
    )


def _memory(trainer: StepGRPOTrainer, facts: list[_Facts]) -> dict[str, str]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    groups = trainer.optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    state = 2 * sum(p.numel() * p.element_size() for p in trained)
    memory = {
        "weights": _gigabytes(weights),
        "peak so far": f"{_gigabytes(max(fact.peak_bytes for fact in facts))} in the fullest "
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


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
