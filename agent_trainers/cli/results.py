"""Files that a training run leaves: figures, model card, learning curve, page, trajectories."""

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from transformers import TrainerCallback

from agent_envs.data.files import write_json
from agent_trainers.cli.output_folder import RESULTS_FILE
from agent_trainers.monitoring.report import plot_learning_curve, write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
    BatchRecord,
    Mark,
    TrajectorySample,
    choose,
    save_samples,
    trained_samples,
)
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trajectory import Trajectory, save_trajectories

PACKAGES: Final = ("agent-r1", "gymnasium", "torch", "transformers", "trl", "accelerate")
SAMPLES_PER_BATCH: Final = 16
SAMPLES_ON_PAGE: Final = 4
NEWEST_ON_PAGE: Final = 3


class SampleCollector(TrainerCallback):  # type: ignore[misc]
    """Saves trajectories of the first step, the last, and every so many, as files and a page."""

    def __init__(self, trainer: StepGRPOTrainer, title: str, every: int = 0) -> None:
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
        """Sample the training batch if it is due; collective."""
        trainer, step = self._trainer, state.global_step
        is_due = step in (1, state.max_steps) or (self._every and step % self._every == 0)
        if not is_due or (record := trainer.last_batch) is None:
            return
        self._sample(record, f"training, step {step}", new_logprobs=trainer.current_logprobs())
        if trainer.accelerator.is_main_process:
            folder = Path(trainer.args.output_dir) / "trajectories"
            save_samples(folder / f"step_{step:06d}.jsonl.gz", self._batches[-1])
            self.write_page()

    def collect_evaluated(self, label: str) -> None:
        """Sample the last evaluation."""
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
        """Write ``trajectories.html``."""
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
    may be empty. ``of_in_domain`` is the success in an evaluation-only environment relative to that
    in the trained ones.
    """
    evaluated = trainer.training_log.evaluated
    by_environment: dict[str, dict[str, Any]] = {}
    for name in [] if evaluated is None else evaluated.names:
        is_trained = evaluated is not None and name not in evaluated.variants
        own = {"is_trained": is_trained, **_measured(before.get(name), after.get(name))}
        if not is_trained and name in after and after[""]["success"]:
            own["of_in_domain"] = own["success_after"] / after[""]["success"]
        by_environment[name] = own
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
    columns = [Column(name, justify="right") for name in ("before", "after", "of in-domain")]
    where = results.get("program") or results.get("env") or "several environments"
    table = Table("", *columns, title=f"{results['algorithm']} on {where}", min_width=60)
    shown = [("success", results, "success", "{:.1%}"), ("return", results, "return", "{:.3f}")]
    for name, own in results.get("by_environment", {}).items():
        label = f"  {name}" + ("" if own["is_trained"] else ", evaluation only")
        shown.append((label, own, "success", "{:.1%}"))
    for label, own, kind, form in shown:
        values = [own[f"{kind}_before"], own[f"{kind}_after"], own.get("of_in_domain")]
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
