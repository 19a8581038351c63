"""What a training run leaves behind: a table, ``results.json``, a picture, a page, trajectories."""

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from agent_trainers.files import write_json
from agent_trainers.grpo import StepGRPOTrainer
from agent_trainers.report import TrajectorySample, plot_learning_curve, write_trajectory_page
from agent_trainers.trajectory import save_trajectories

PACKAGES: Final = ("agent-r1", "gymnasium", "torch", "transformers", "trl", "accelerate")
SAMPLES_PER_BATCH: Final = 4


class SampleCollector(TrainerCallback):  # type: ignore[misc]
    """Keeps a few trajectories of the first and of the last training batch."""

    def __init__(self, trainer: StepGRPOTrainer) -> None:
        """Collect from `trainer`."""
        self._trainer = trainer
        self.samples: list[TrajectorySample] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep samples of the first and of the last step."""
        if state.global_step in (1, state.max_steps):
            self.collect("train", f"training, step {state.global_step}")

    def collect(self, mode: str, label: str) -> None:
        """Keep samples of what was played last in `mode`: failures and successes in turn."""
        trajectories, advantages = self._trainer.trajectories[mode], self._trainer.advantages[mode]
        by_outcome = {
            outcome: [i for i, t in enumerate(trajectories) if t.success is outcome]
            for outcome in (False, True)
        }
        training = mode == "train"
        chosen: list[int] = []
        while len(chosen) < SAMPLES_PER_BATCH and any(by_outcome.values()):
            chosen += [indices.pop(0) for indices in by_outcome.values() if indices]
        self.samples += [
            TrajectorySample(
                label=label,
                trajectory=trajectories[i],
                # A trajectory that cannot be scored was not trained on.
                advantages=[float(a) for a in advantages[i]]
                if training and trajectories[i].is_scorable
                else None,
            )
            for i in chosen[:SAMPLES_PER_BATCH]
        ]


def write_results(
    trainer: StepGRPOTrainer,
    samples: Sequence[TrajectorySample],
    *,
    run: Mapping[str, Any],
    before: Mapping[str, float],
    after: Mapping[str, float],
    seconds: Mapping[str, float],
) -> None:
    """Write everything into the output folder and print the table."""
    folder = Path(trainer.args.output_dir)
    history = trainer.state.log_history
    results = {
        **run,
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "return_before": before.get("return"),
        "return_after": after.get("return"),
        "num_eval_episodes": after.get("num_episodes", 0),
        "steps": trainer.state.global_step,
        **seconds,
        "num_processes": trainer.accelerator.num_processes,
        "num_parameters": trainer.accelerator.unwrap_model(trainer.model).num_parameters(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
    }
    write_json(folder / "results.json", results)
    plot_learning_curve(folder / "learning_curve.png", history, before=before, after=after)
    write_trajectory_page(
        folder / "trajectories.html", samples, tokenizer=trainer.processing_class, title=run["env"]
    )
    save_trajectories(folder / "trajectories.jsonl.gz", [s.trajectory for s in samples])
    _print_table(results, folder)


def _print_table(results: Mapping[str, Any], folder: Path) -> None:
    table = Table(title=f"{results['algorithm']} on {results['env']}", min_width=60)
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for name, form in (("success", "{:.1%}"), ("return", "{:.3f}")):
        values = (results[f"{name}_before"], results[f"{name}_after"])
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))
    table.caption = (
        f"{results['num_eval_episodes']} evaluation episodes; {results['steps']} optimiser steps "
        f"in {results['seconds']:.0f} s ({results['total_seconds']:.0f} s in all)"
    )
    console = Console()
    console.print(table)
    for name, what in (
        ("results.json", "figures"),
        ("learning_curve.png", "learning curve"),
        ("trajectories.html", "sample trajectories"),
        ("model.safetensors", "trained model"),
    ):
        console.print(f"{what:>20}: {folder / name}", highlight=False)
