"""``agent-r1-train --dry_run``: one batch from the first prompt to the gradient, without an update.

The trainer runs as usual, with its sampler, processes and critic, and is stopped before the first
optimiser step.
"""

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from agent_envs.errors import ConfigurationError
from agent_trainers.monitoring.episode_statistics import EpisodeSummary, summarise
from agent_trainers.monitoring.live_view import NUMBERS, duration
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
    BatchRecord,
    TrajectorySample,
    choose,
    state_change,
    trained_samples,
)
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer

PAGE: Final = "dry_run.html"
NUM_SAMPLES: Final = 8
MAX_GROUPS: Final = 10
MAX_ROWS: Final = 12
MAX_MESSAGE_CHARS: Final = 400
STRIP_WIDTH: Final = 72
_RATES: Final = (
    ("rows/padding_share", "padding share", "{:.1%}"),
    ("rows/forwarded_per_trained_token", "forwarded per trained token", "{:.2f}"),
    ("rows/tokens_per_second", "tokens per second", "{:,.0f}"),
    ("frac_reward_zero_std", "groups without signal", "{:.0%}"),
)


class _BatchDoneError(Exception):
    """The gradient of the batch is there."""


class _StopBeforeUpdate(TrainerCallback):  # type: ignore[misc]
    """Stops training between the gradient and the optimiser step."""

    def __init__(self, trainer: StepGRPOTrainer) -> None:
        self._trainer = trainer
        self.seconds: Mapping[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop. Relies on: called on every process after the last backward pass of a step."""
        self.seconds = self._trainer.clock.seconds()
        raise _BatchDoneError


def prepare(config: StepGRPOConfig) -> None:
    """Change the settings so that nothing is saved or sent; call before the trainer is made."""
    config.report_to = []
    config.disable_tqdm = True
    config.save_strategy = SaveStrategy.NO
    config.push_to_hub = False
    config.log_completions = False


def dry_run(trainer: StepGRPOTrainer, title: str, checkpoint: str | None = None) -> None:
    """Run one batch up to its gradient and print it; `prepare` has changed the settings.

    Raises:
        ConfigurationError: If the model cannot be stopped before its update.
    """
    if trainer.is_deepspeed_enabled:
        raise ConfigurationError(
            "--dry_run does not work with DeepSpeed, which updates the weights in the backward "
            "pass. Remove its options for the dry run."
        )
    trainer.remove_callback(MetricsLog)  # would overwrite the metrics of a run in the folder
    stop = _StopBeforeUpdate(trainer)
    trainer.add_callback(stop)
    with contextlib.suppress(_BatchDoneError):
        trainer.train(resume_from_checkpoint=checkpoint)
    record = trainer.last_batch
    assert record is not None
    new_logprobs = trainer.current_logprobs()
    episodes: list[EpisodeSummary] = gather_object([*map(summarise, record.trajectories)])
    has_signal: list[bool] = gather_object([bool(np.any(values)) for values in record.advantages])
    counts: list[dict[str, int]] = gather_object([_count(record)])
    drifts: list[npt.NDArray[Any]] = gather_object([_drift(record, new_logprobs)])
    peak: int = max(gather_object([_peak_bytes()]))
    if not trainer.accelerator.is_main_process:
        return

    # the trajectory with the most rows, then steps, tells most
    num_rows = np.bincount([r.episode for r in record.rows], minlength=len(record.trajectories))
    lengths = [(num_rows[i], len(t.transitions)) for i, t in enumerate(record.trajectories)]
    *chosen, shown = trained_samples(
        record,
        [*choose(record.trajectories, NUM_SAMPLES), lengths.index(max(lengths))],
        label="dry run",
        optimiser_step=trainer.state.global_step,
        new_logprobs=new_logprobs,
    )
    page = Path(trainer.args.output_dir) / PAGE
    write_trajectory_page(page, chosen, tokenizer=trainer.processing_class, title=title)
    console = Console()
    console.rule(f"[bold]dry run: {title}", align="left")
    console.print(_groups(episodes, has_signal))
    _print_trajectory(console, record, shown, trainer.processing_class)
    batch = {name: f"{sum(count[name] for count in counts):,}" for name in counts[0]}
    drift = np.concatenate(drifts)
    mean = drift.sum() / max(1, drift.size)
    batch["drift, mean"] = f"{mean:.2e} between sampled and recomputed log-probabilities"
    batch["drift, largest"] = f"{drift.max(initial=0.0):.2e}"
    for name, label, form in (*_RATES, *NUMBERS):
        values = [v for v in trainer._metrics["train"].get(name, []) if not math.isnan(v)]
        if values:
            batch[label] = form.format(sum(values) / len(values))
    console.print(_facts("the batch", batch))
    console.print(_facts("one optimiser step", _times(trainer, stop.seconds)))
    console.print(_facts("memory", _memory(trainer, peak)))
    console.print(f"{'trajectories':>24}: {page}", highlight=False, soft_wrap=True)
    console.print("No weights were changed and none saved.")


def _count(record: BatchRecord) -> dict[str, int]:
    """Return the rows and tokens of this process."""
    return {
        "rows": len(record.rows),
        "padding rows": record.tensors["prompt_ids"].size(0) - len(record.rows),
        "steps": sum(len(t.transitions) for t in record.trajectories),
        "prompt tokens": sum(len(row.prompt_ids) for row in record.rows),
        "sampled tokens": sum(sum(row.is_action) for row in record.rows),
        "trained tokens": sum(sum(row.is_trained) for row in record.rows),
        "tokens": sum(len(row.prompt_ids) + len(row.completion_ids) for row in record.rows),
    }


def _drift(record: BatchRecord, new_logprobs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the differences of sampled and recomputed log-probabilities."""
    is_action = record.tensors["action_mask"].cpu().numpy().astype(bool)
    sampled = record.tensors["sampling_per_token_logps"].float().cpu().numpy()
    # vLLM returns none for some tokens
    difference: npt.NDArray[Any] = np.nan_to_num(np.abs(new_logprobs - sampled)[is_action])
    return difference


def _times(trainer: StepGRPOTrainer, seconds: Mapping[str, float]) -> dict[str, str]:
    total = seconds["rollout"] + seconds["score"] + seconds["train"]
    num_processes, num_steps = trainer.accelerator.num_processes, trainer.state.max_steps
    processes = f" on {num_processes} processes" if num_processes > 1 else ""
    return {
        "generate": f"{seconds['rollout'] - seconds['wait']:.2f} s",
        "wait for environments": f"{seconds['wait']:.2f} s",
        "score": f"{seconds['score']:.2f} s",
        "forward and backward": f"{seconds['train']:.2f} s",
        "total": f"{total:.2f} s{processes}, without the optimiser's update; "
        f"{num_steps:,} steps would take about {duration(total * num_steps)}",
    }


def _memory(trainer: StepGRPOTrainer, peak: int) -> dict[str, str]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    moments = 2 * sum(p.numel() * p.element_size() for p in trained if p.requires_grad)
    memory = {
        "weights": _size(weights),
        "peak so far": f"{_size(peak)} in the largest process, with gradients and activations",
    }
    if "adam" in str(trainer.args.optim).lower():
        memory["to come"] = f"about {_size(moments)} for the optimiser's two moments"
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


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _facts(title: str, facts: Mapping[str, str]) -> Table:
    names = Column(justify="right", style="dim", min_width=24)
    table = Table.grid(names, Column(), padding=(0, 2))
    table.title, table.title_justify = title, "left"
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _groups(episodes: Sequence[EpisodeSummary], has_signal: Sequence[bool]) -> Table:
    """Return the groups with the returns of their episodes, grey without an advantage."""
    groups: dict[str, list[tuple[EpisodeSummary, bool]]] = {}
    for episode, signal in zip(episodes, has_signal, strict=True):
        groups.setdefault(episode.group_id, []).append((episode, signal))
    title = f"{len(groups)} groups, {len(episodes)} episodes"
    figures = [Column(name, justify="right") for name in ("success", "mean", "std", "turns")]
    group, task = Column("group", no_wrap=True), Column("task", overflow="fold")
    table = Table(group, task, *figures, "returns", title=title, title_justify="left")
    for number, members in enumerate(list(groups.values())[:MAX_GROUPS], start=1):
        scored = [episode for episode, _ in members if episode.is_scorable]
        returns = [sum(episode.rewards) for episode in scored]
        shown = [
            Text(f"{sum(e.rewards):.2f}", ("green" if e.success else "") if signal else "dim")
            if e.is_scorable
            else Text("failed", "red")
            for e, signal in members
        ]
        table.add_row(
            str(number),
            members[0][0].task_id,
            f"{sum(episode.success for episode in scored)}/{len(returns)}",
            f"{np.mean(returns):.2f}" if returns else "-",
            f"{np.std(returns):.2f}" if returns else "-",
            f"{np.mean([episode.num_steps for episode, _ in members]):.1f}",
            Text(" ").join(shown),
        )
    if len(groups) > MAX_GROUPS:
        table.caption = f"and {len(groups) - MAX_GROUPS} more groups"
    return table


def _print_trajectory(
    console: Console, record: BatchRecord, sample: TrajectorySample, tokenizer: Any
) -> None:
    """Print a trajectory step by step, its rows and masks, and some other rows."""
    trajectory = sample.trajectory
    number = next(i for i, t in enumerate(record.trajectories) if t is trajectory)
    console.rule(f"trajectory {number + 1}, step by step", align="left")
    for t in range(len(trajectory.transitions)):
        console.print(_step(sample, t, tokenizer))
    success = ", success" if trajectory.success else ""
    end = f"ended: {trajectory.stop_reason.value}, return {trajectory.return_:.3f}{success}\n"
    console.print(Text(end, "bold"))
    console.print(_rows(record, number))
    for i, row in enumerate(sample.rows, start=1):
        trained = ["█" if is_trained else "░" for is_trained in row.is_trained]
        kinds = ["▒"] * len(row.prompt_ids) + trained
        width = min(STRIP_WIDTH, len(kinds))
        strip = "".join(kinds[j * len(kinds) // width] for j in range(width))
        console.print(Text.assemble((f"row {i} ", "dim"), strip))
    console.print("[dim]▒ prompt   ░ observation, masked   █ trained[/]\n")


def _step(sample: TrajectorySample, t: int, tokenizer: Any) -> Group:
    """Return the change of state before a step, its action with advantages, and its reward."""
    transition = sample.trajectory.transitions[t]
    trained = sample.steps[t] if sample.steps is not None else None
    change = state_change(sample.trajectory, t)
    lines = []
    if trained is not None and trained.fork_reason:
        lines.append(Text(f"a new row begins here: {trained.fork_reason}", "blue"))
    for mark, style, messages in (("-", "red", change.dropped), ("+", "cyan", change.added)):
        for message in messages:
            content = str(message.get("content", ""))
            if (more := len(content) - MAX_MESSAGE_CHARS) > 0:
                content = f"{content[:MAX_MESSAGE_CHARS]} … ({more} more characters)"
            lines.append(Text.assemble((f"{mark} {message['role']} ", style), content))
    action = Text()
    for j, token in enumerate(transition.completion_ids):
        style = "dim"
        if trained is not None and trained.is_trained[j]:
            advantage = trained.advantages[j]
            style = "green" if advantage > 1e-6 else "red" if advantage < -1e-6 else ""
        action.append(tokenizer.decode([token]), style).append(" ")
    terms = ", ".join(f"{name} {value:+.3f}" for name, value in transition.reward_terms.items())
    facts = [f"reward {transition.reward:+.3f} ({terms})"]
    if trained is not None and trained.advantages:
        facts.append(f"advantage {np.mean(trained.advantages):+.3f}")
    if trained is not None and trained.values:
        facts.append(f"value {trained.values[0]:+.3f}")
    if code := (transition.info.get("action") or {}).get("error"):
        facts.append(f"error {code}")
    head = f"step {t + 1}" if trained is None else f"step {t + 1}, row {trained.row + 1}"
    body = Group(*lines, action, Text(", ".join(facts), "dim"))
    return Group(Text(head, "bold"), Padding(body, (0, 0, 0, 2)))


def _rows(record: BatchRecord, first: int) -> Table:
    """Return some rows: those of trajectory `first`, then others."""
    numbers = sorted(range(len(record.rows)), key=lambda i: record.rows[i].episode != first)
    all_advantages = record.tensors["advantages"].float().cpu().numpy()
    title = f"{len(record.rows)} rows of the main process"
    figures = [Column(name, justify="right") for name in ("prompt", "completion", "trained")]
    number, last = Column("trajectory", justify="right"), "advantage of each step"
    table = Table(number, "steps", *figures, last, title=title, title_justify="left")
    for i in numbers[:MAX_ROWS]:
        row = record.rows[i]
        row_steps, is_action = np.array(row.steps), np.array(row.is_action, bool)
        steps = np.unique(row_steps[is_action])
        own = all_advantages[i, : len(row_steps)]
        table.add_row(
            str(row.episode + 1),
            f"{steps[0] + 1}" + (f" to {steps[-1] + 1}, merged" if len(steps) > 1 else ""),
            str(len(row.prompt_ids)),
            str(len(row.completion_ids)),
            str(sum(row.is_trained)),
            " ".join(f"{own[is_action & (row_steps == step)].mean():+.2f}" for step in steps),
        )
    if len(record.rows) > MAX_ROWS:
        table.caption = f"and {len(record.rows) - MAX_ROWS} more rows"
    return table
