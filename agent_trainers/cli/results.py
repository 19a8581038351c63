"""What a training run shows and leaves: figures, learning curve, trajectories, and the dry run.

In a dry run the trainer runs as usual, with its sampler, processes and critic, from the first
prompt to the gradient, and is stopped before the first optimiser step.
"""

import contextlib
import datetime
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import TrainerCallback

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.output_folder import RESULTS_FILE
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.report import plot_learning_curve, write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
    BatchRecord,
    Mark,
    TrajectorySample,
    choose,
    state_change,
    trained_samples,
)
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trajectory import Trajectory, save_trajectories

PACKAGES: Final = ("agent-r1", "gymnasium", "torch", "transformers", "trl", "accelerate")
SAMPLES_PER_BATCH: Final = 16
SAMPLES_ON_PAGE: Final = 4
NEWEST_ON_PAGE: Final = 3
PAGE: Final = "dry_run.html"
NUM_SAMPLES: Final = 8
MAX_GROUPS: Final = 10
MAX_MESSAGE_CHARS: Final = 400


class SampleCollector(TrainerCallback):  # type: ignore[misc]
    """Saves trajectories of the first step, the last, and every so many, as files and a page."""

    def __init__(self, trainer: StepGRPOTrainer, title: str, every: int = 10) -> None:
        """Sample every `every` optimiser steps; 0 for the first and the last only."""
        self._trainer = trainer
        self._title = title
        self._every = every
        self._batches: list[list[TrajectorySample]] = []

    @property
    def samples(self) -> list[TrajectorySample]:
        """Samples on the page: some of the first batch and of the newest."""
        shown = [*self._batches[:1], *self._batches[1:][-NEWEST_ON_PAGE:]]
        return [sample for batch in shown for sample in batch[:SAMPLES_ON_PAGE]]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, step = self._trainer, state.global_step
        is_due = step in (1, state.max_steps) or (self._every and step % self._every == 0)
        if not is_due or (record := trainer.last_batch) is None:
            return
        self._sample(record, f"training, step {step}", new_logprobs=trainer.current_logprobs())
        if trainer.accelerator.is_main_process:
            folder = Path(trainer.args.output_dir) / "trajectories"
            played = [sample.trajectory for sample in self._batches[-1]]
            save_trajectories(folder / f"step_{step:06d}.jsonl.gz", played)
            self.write_page()

    def collect_evaluated(self, label: str) -> None:
        trajectories = self._trainer.trajectories["eval"]
        self._sample(BatchRecord(trajectories=trajectories, rows=(), tensors={}), label)

    def _sample(self, record: BatchRecord, label: str, **options: Any) -> None:
        """Sample a batch: first one trajectory for each active alarm."""
        alarms = {sign for each in self._trainer.extensions for sign in each.active_alarms()}
        shown: dict[str, int] = {}
        for i, trajectory in enumerate(record.trajectories if alarms else ()):
            for mark in self._marks(trajectory):
                if mark.sign in alarms:
                    shown.setdefault(mark.sign, i)
        chosen = dict.fromkeys([*shown.values(), *choose(record.trajectories, SAMPLES_PER_BATCH)])
        self._batches.append(
            trained_samples(
                record,
                [*chosen][:SAMPLES_PER_BATCH],
                label=label,
                find_marks=self._marks,
                **options,
            )
        )

    def _marks(self, trajectory: Trajectory) -> Sequence[Mark]:
        return [mark for each in self._trainer.extensions for mark in each.marks(trajectory)]

    def write_page(self) -> None:
        write_trajectory_page(
            Path(self._trainer.args.output_dir) / "trajectories.html",
            self.samples,
            tokenizer=self._trainer.processing_class,
            title=self._title,
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run does."""
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in PACKAGES
    }


def write_results(
    trainer: StepGRPOTrainer,
    collector: SampleCollector,
    facts: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    """Write results, curve, page and trajectories into the output folder, and print a table.

    `facts` describe the run; `before` and `after` are the evaluations (see `train.evaluate`), both
    may be empty.
    """
    evaluated = trainer.evaluated
    by_environment: dict[str, dict[str, Any]] = {}
    if evaluated is not None:
        for name in evaluated.names:
            figures = _measured(before.get(name), after.get(name))
            by_environment[name] = {"is_trained": name not in evaluated.variants, **figures}
    results = {
        **facts,
        **_measured(before.get(""), after.get("")),
        **({"by_environment": by_environment} if by_environment else {}),
        "steps": trainer.state.global_step,
        "seconds": round(trainer.training_seconds, 2),
        "num_processes": trainer.accelerator.num_processes,
        "num_parameters": trainer.accelerator.unwrap_model(trainer.model).num_parameters(),
        **{name: v for each in trainer.extensions for name, v in each.results().items()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    folder = Path(trainer.args.output_dir)
    write_json(folder / RESULTS_FILE, results)
    plot_learning_curve(
        folder / "learning_curve.png",
        trainer.state.log_history,
        before=results["success_before"],
        after=results["success_after"],
    )
    collector.write_page()
    save_trajectories(folder / "trajectories.jsonl.gz", [s.trajectory for s in collector.samples])
    trainer.create_model_card(model_name=folder.name)
    _print_results(results, folder)


def _measured(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the figures of an environment before and after training; None if not measured."""
    figures: dict[str, Any] = {
        f"{name}_{when}": (measured or {}).get(name)
        for name in ("success", "return")
        for when, measured in (("before", before), ("after", after))
    }
    return figures | {"num_eval_episodes": (after or {}).get("num_episodes", 0)}


def _print_results(results: Mapping[str, Any], folder: Path) -> None:
    """Print success and return before and after, also of each environment, and the folder."""
    columns = [Column(name, justify="right") for name in ("before", "after")]
    where = results.get("program") or results.get("env") or "several environments"
    table = Table("", *columns, title=f"{results['algorithm']} on {where}", min_width=60)
    shown = [("success", results, "success", "{:.1%}"), ("return", results, "return", "{:.3f}")]
    for name, own in results.get("by_environment", {}).items():
        label = f"  {name}" + ("" if own["is_trained"] else ", evaluation only")
        shown.append((label, own, "success", "{:.1%}"))
    for label, own, kind, form in shown:
        values = [own[f"{kind}_before"], own[f"{kind}_after"]]
        table.add_row(label, *("-" if value is None else form.format(value) for value in values))
    table.caption = (
        f"{results['num_eval_episodes']} evaluation episodes: {results['evaluated_on']}; "
        f"{results['steps']} optimiser steps "
        f"in {results['seconds']:.0f} s ({results['total_seconds']:.0f} s in all)"
    )
    console = Console()
    console.print(table)
    for alarm in results.get("hacking_alarms", ()):
        steps = f"steps {alarm['first_step']} to {alarm['last_step']}"
        console.print(f"Reward hacking? {steps}, {alarm['text']}", style="red", highlight=False)
    console.print(f"Model, metrics, figures and trajectories: {folder}", highlight=False)


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
    record = trainer.last_batch
    assert record is not None
    played = record.trajectories
    returns = [f"{t.return_:.2f}" if t.is_scorable else "failed" for t in played]
    styles = ["" if np.any(advantages) else "dim" for advantages in record.advantages]
    own = [(t.group_id, t.task_id, *x) for t, *x in zip(played, returns, styles, strict=True)]
    episodes = gather_object(own)
    if not trainer.accelerator.is_main_process:
        return
    # the trajectory with the most rows, then steps, tells most
    num_rows = np.bincount([row.episode for row in record.rows], minlength=len(played))
    lengths = [(num_rows[i], len(t.transitions)) for i, t in enumerate(played)]
    longest = lengths.index(max(lengths))
    *chosen, shown = trained_samples(
        record, [*choose(played, NUM_SAMPLES), longest], label="dry run"
    )
    page = Path(trainer.args.output_dir) / PAGE
    write_trajectory_page(page, chosen, tokenizer=trainer.processing_class, title=title)
    console = Console(highlight=False)
    console.rule(f"[bold]dry run: {title}", align="left")
    groups: dict[str, Text] = {}
    for group_id, task_id, shown_return, style in episodes:
        groups.setdefault(group_id, Text(f"  {task_id}:")).append(f" {shown_return}", style)
    console.print(
        f"{len(groups)} groups, {len(episodes)} episodes; returns, grey without advantage"
    )
    console.print(*list(groups.values())[:MAX_GROUPS], sep="\n")
    console.rule("a trajectory, step by step", align="left")
    for t in range(len(shown.trajectory.transitions)):
        lines = map(Text, _step(shown, t))
        console.print(Text(f"step {t + 1}", "bold"), *lines, sep="\n  ")
    end = shown.trajectory
    console.print(f"ended: {end.stop_reason.value}, return {end.return_:.3f}", style="bold")
    console.rule("metrics of the batch that are not 0", align="left")
    for name, values in trainer._metrics["train"].items():
        if value := float(np.mean(values)):
            console.print(f"{name:>40}: {value:.4g}", soft_wrap=True)
    is_cuda = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if is_cuda else psutil.Process().memory_info().rss
    console.print(f"{'memory in GiB':>40}: {peak / 2**30:.2f}")
    console.print(f"{'trajectories':>40}: {page}", soft_wrap=True)
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
