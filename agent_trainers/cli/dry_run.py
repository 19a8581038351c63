"""``agent-r1-train --dry_run``: one batch from the first prompt to the gradient, without an update.

The trainer runs as usual, with its sampler, processes and critic, and is stopped before the first
optimiser step.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.text import Text
from transformers import TrainerCallback

from agent_envs.errors import ConfigurationError
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
    TrajectorySample,
    choose,
    state_change,
    trained_samples,
)
from agent_trainers.trainers.grpo import StepGRPOTrainer

PAGE: Final = "dry_run.html"
NUM_SAMPLES: Final = 8
MAX_GROUPS: Final = 10
MAX_MESSAGE_CHARS: Final = 400


class _BatchDoneError(Exception):
    """The gradient of the batch is there."""


class _StopBeforeUpdate(TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop. Relies on: called on every process after the last backward pass of a step."""
        raise _BatchDoneError


def dry_run(trainer: StepGRPOTrainer, title: str, checkpoint: str | None = None) -> None:
    """Run one batch up to its gradient and print it; the settings of `trainer` save nothing."""
    if trainer.is_deepspeed_enabled:
        raise ConfigurationError(
            "--dry_run does not work with DeepSpeed, which updates the weights in the backward "
            "pass. Remove its options for the dry run."
        )
    trainer.remove_callback(MetricsLog)  # would overwrite the metrics of a run in the folder
    trainer.add_callback(_StopBeforeUpdate())
    with contextlib.suppress(_BatchDoneError):
        trainer.train(resume_from_checkpoint=checkpoint)
    seconds = trainer.clock.seconds()
    record = trainer.last_batch
    assert record is not None
    played, rows = record.trajectories, record.rows
    new_logprobs = trainer.current_logprobs()
    is_action = record.tensors["action_mask"].cpu().numpy().astype(bool)
    sampled = record.tensors["sampling_per_token_logps"].float().cpu().numpy()
    # vLLM returns none for some tokens
    drift = np.nan_to_num(np.abs(new_logprobs - sampled)[is_action])
    returns = [f"{t.return_:.2f}" if t.is_scorable else "failed" for t in played]
    styles = ["" if np.any(advantages) else "dim" for advantages in record.advantages]
    episodes = [(t.group_id, t.task_id, *x) for t, *x in zip(played, returns, styles, strict=True)]
    counts = {
        "rows": len(rows),
        "steps": sum(len(t.transitions) for t in played),
        "prompt tokens": sum(len(row.prompt_ids) for row in rows),
        "sampled tokens": sum(sum(row.is_action) for row in rows),
        "trained tokens": sum(sum(row.is_trained) for row in rows),
    }
    shares = gather_object([(drift, episodes, counts)])
    if not trainer.accelerator.is_main_process:
        return
    # the trajectory with the most rows, then steps, tells most
    num_rows = np.bincount([row.episode for row in rows], minlength=len(played))
    lengths = [(num_rows[i], len(t.transitions)) for i, t in enumerate(played)]
    *chosen, shown = trained_samples(
        record,
        [*choose(played, NUM_SAMPLES), lengths.index(max(lengths))],
        label="dry run",
        new_logprobs=new_logprobs,
    )
    page = Path(trainer.args.output_dir) / PAGE
    write_trajectory_page(page, chosen, tokenizer=trainer.processing_class, title=title)
    console = Console(highlight=False)
    console.rule(f"[bold]dry run: {title}", align="left")
    groups: dict[str, Text] = {}
    everywhere = [episode for share in shares for episode in share[1]]
    for group_id, task_id, shown_return, style in everywhere:
        groups.setdefault(group_id, Text(f"  {task_id}:")).append(f" {shown_return}", style)
    console.print(
        f"{len(groups)} groups, {len(everywhere)} episodes; returns, grey without advantage"
    )
    console.print(*list(groups.values())[:MAX_GROUPS], sep="\n")
    console.rule("a trajectory, step by step", align="left")
    for t in range(len(shown.trajectory.transitions)):
        lines = map(Text, _step(shown, t))
        console.print(Text(f"step {t + 1}", "bold"), *lines, sep="\n  ")
    end = shown.trajectory
    console.print(f"ended: {end.stop_reason.value}, return {end.return_:.3f}", style="bold")
    console.rule("the batch", align="left")
    facts = {name: f"{sum(share[2][name] for share in shares):,}" for name in counts}
    facts |= {f"seconds to {name}": f"{t:.2f}" for name, t in seconds.items()}
    is_cuda = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if is_cuda else psutil.Process().memory_info().rss
    facts["memory"] = f"{peak / 2**30:.2f} GiB {'at most on the GPU' if is_cuda else 'in use'}"
    drifts = np.concatenate([share[0] for share in shares])
    facts["drift"] = (
        f"{drifts.sum() / max(1, drifts.size):.2e} on average, {drifts.max(initial=0.0):.2e} at "
        "most, between sampled and recomputed log-probabilities"
    )
    for name, value in {**facts, "trajectories": str(page)}.items():
        console.print(f"{name:>20}: {value}", soft_wrap=True)
    console.print("No weights were changed and none saved.")


def _step(sample: TrajectorySample, t: int) -> Iterator[str]:
    """Yield the change of state before a step, its action, and its reward and advantage."""
    transition, trained = sample.trajectory.transitions[t], (sample.steps or ())[t]
    added, dropped = state_change(sample.trajectory, t)
    if trained.fork_reason:
        yield f"a new row begins here: {trained.fork_reason}"
    for mark, messages in (("-", dropped), ("+", added)):
        for message in messages:
            text = str(message.get("content", ""))
            shortened = f"{text[:MAX_MESSAGE_CHARS]}..." if len(text) > MAX_MESSAGE_CHARS else text
            yield f"{mark} {message['role']} {shortened}"
    yield f"> {transition.action}"
    terms = ", ".join(f"{name} {value:+.3f}" for name, value in transition.reward_terms.items())
    facts = [f"reward {transition.reward:+.3f} ({terms})"]
    if trained.advantages:
        facts.append(f"row {trained.row + 1}, advantage {np.mean(trained.advantages):+.3f}")
    if trained.values:
        facts.append(f"value {trained.values[0]:+.3f}")
    if code := (transition.info.get("action") or {}).get("error"):
        facts.append(f"error {code}")
    yield ", ".join(facts)
