"""Files that a training run leaves: figures, model card, learning curve, page, trajectories."""

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCardData
from rich.console import Console
from rich.table import Column, Table
from transformers import TrainerCallback

from agent_envs.data.files import write_json, write_text
from agent_trainers.cli.output_folder import RESULTS_FILE
from agent_trainers.cli.policies import EMBEDDED
from agent_trainers.monitoring.report import plot_learning_curve, write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
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
        samples = trained_samples(
            record,
            self._choose(record.trajectories),
            label=f"training, step {step}",
            new_logprobs=trainer.current_logprobs(),
            find_marks=self._marks,
        )
        self._batches.append(samples)
        if trainer.accelerator.is_main_process:
            folder = Path(trainer.args.output_dir) / "trajectories"
            save_samples(folder / f"step_{step:06d}.jsonl.gz", samples)
            self.write_page()

    def collect_evaluated(self, label: str) -> None:
        """Sample the last evaluation."""
        trajectories = self._trainer.trajectories["eval"]
        self._batches.append(
            [
                TrajectorySample(
                    label=f"{label}, {t.env}" if t.env else label,
                    trajectory=t,
                    marks=self._marks(t),
                )
                for t in (trajectories[i] for i in self._choose(trajectories))
            ]
        )

    def _choose(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Return the indices of the samples: first one for each active alarm."""
        alarms = {sign for each in self._trainer.extensions for sign in each.active_alarms()}
        shown: dict[str, int] = {}
        for i, trajectory in enumerate(trajectories if alarms else ()):
            for mark in self._marks(trajectory):
                if mark.sign in alarms:
                    shown.setdefault(mark.sign, i)
        chosen = [*shown.values(), *choose(trajectories, SAMPLES_PER_BATCH)]
        return list(dict.fromkeys(chosen))[:SAMPLES_PER_BATCH]

    def _marks(self, trajectory: Trajectory) -> list[Mark]:
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


def by_environment(
    trainer: StepGRPOTrainer, before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of each of several environments; empty for a single one.

    ``of_in_domain`` is the success in an evaluation-only environment relative to the trained ones.
    """
    figures: dict[str, dict[str, Any]] = {}
    evaluated = trainer.training_log.evaluated
    for name in [] if evaluated is None else evaluated.names:
        first, last = (measured.get("envs", {}).get(name, {}) for measured in (before, after))
        is_trained = evaluated is not None and name not in evaluated.variants
        figures[name] = {"is_trained": is_trained, **_measured(first, last)}
        if not is_trained and last and after.get("success"):
            figures[name]["of_in_domain"] = last["success"] / after["success"]
    return figures


def _measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "return_before": before.get("return"),
        "return_after": after.get("return"),
        "num_eval_episodes": after.get("num_episodes", 0),
    }


def write_results(
    trainer: StepGRPOTrainer,
    collector: SampleCollector,
    facts: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    """Write results, curve, page and trajectories into the output folder, and print a table.

    `facts` describe the run; `before` and `after` are the evaluations, both may be empty.
    """
    figures = by_environment(trainer, before, after)
    results = {
        **facts,
        **_measured(before, after),
        **({"by_environment": figures} if figures else {}),
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
    write_text(folder / "README.md", _model_card(results, folder.name))
    print_results(results, folder)


def _model_card(results: Mapping[str, Any], name: str) -> str:
    model = results["model"]
    is_on_hub = model != EMBEDDED and not Path(model).exists()
    data = ModelCardData(
        base_model=model if is_on_hub else None, library_name="transformers",
        pipeline_tag="text-generation", tags=["agent-r1", "trl", results["algorithm"]],
    )  # fmt: skip
    facts = ("model", "program", "env", "algorithm", "steps", "success_before", "success_after",
             "num_eval_episodes", "evaluated_on", "versions")  # fmt: skip
    lines = "\n".join(f"- {fact}: {results[fact]}" for fact in facts if results.get(fact))
    return (
        f"---\n{data.to_yaml()}\n---\n# {name}\n\nA language model trained by step-level "
        f"reinforcement learning with Agent-R1 Gym:\n\n{lines}\n\n```sh\n{results['command']}"
        "\n```\n"
    )


def print_results(results: Mapping[str, Any], folder: Path) -> None:
    """Print success and return before and after, also of each environment, and the folder."""
    columns = [Column(name, justify="right") for name in ("before", "after", "of in-domain")]
    where = results.get("program") or results.get("env") or "several environments"
    table = Table("", *columns, title=f"{results['algorithm']} on {where}", min_width=60)
    shown = [("success", results, "success", "{:.1%}"), ("return", results, "return", "{:.3f}")]
    figures = results.get("by_environment", {})
    for name in sorted(figures, key=lambda name: not figures[name]["is_trained"]):
        label = f"  {name}" + ("" if figures[name]["is_trained"] else ", evaluation only")
        shown.append((label, figures[name], "success", "{:.1%}"))
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
