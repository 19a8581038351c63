"""Files that a training run leaves: figures, model card, learning curve, page, trajectories."""

import datetime
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCardData
from rich.console import Console
from rich.table import Column, Table
from transformers import TrainerCallback

from agent_envs.data.files import write_json
from agent_trainers.cli.models import EMBEDDED
from agent_trainers.cli.output_folder import RESULTS_FILE
from agent_trainers.monitoring.env_statistics import success_curves
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
_FILES: Final = {
    "results.json": "figures", "learning_curve.png": "learning curve",
    "trajectories.html": "sample trajectories", "metrics.jsonl": "metrics",
    "model.safetensors": "trained model", "model.safetensors.index.json": "trained model",
    "adapter_model.safetensors": "trained adapters",
}  # fmt: skip
_SOURCE: Final = ("program", "tasks", "eval_tasks", "reward", "env", "env_kwargs",
                  "eval_env_kwargs", "envs", "eval_envs")  # fmt: skip
_CARD: Final = """---
{metadata}
---
# {title}

A language model trained by step-level reinforcement learning with Agent-R1 Gym.

| | |
|---|---|
{table}

Trained with:

```
{command}
```

Evaluate it with:

```
{evaluate}
```
"""


class SampleCollector(TrainerCallback):  # type: ignore[misc]
    """Saves trajectories of the first step, the last, and every so many, as Parquet and a page."""

    def __init__(self, trainer: StepGRPOTrainer, title: str, every: int = 0) -> None:
        """Sample every `every` optimiser steps; 0 for the first and the last only."""
        self._trainer = trainer
        self._title = title
        self._every = every
        self._batches: list[list[TrajectorySample]] = []
        self.by_environment: Mapping[str, Any] = {}
        """Figures of each of several environments, see `describe_run`."""

    @property
    def samples(self) -> list[TrajectorySample]:
        """Samples on the page: some of the first batch and of the newest."""
        shown = [*self._batches[:1], *self._batches[1:][-NEWEST_ON_PAGE:]]
        return [sample for batch in shown for sample in batch[:SAMPLES_ON_PAGE]]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Sample if it is due."""
        step = state.global_step
        if step in (1, state.max_steps) or (self._every and step % self._every == 0):
            self.collect_trained(step)

    def collect_trained(self, step: int) -> None:
        """Sample the last training batch; collective."""
        trainer = self._trainer
        if (record := trainer.last_batch) is None:
            return
        samples = trained_samples(
            record,
            self._choose(record.trajectories),
            label=f"training, step {step}",
            optimiser_step=step,
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
                    optimiser_step=self._trainer.state.global_step,
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
            curves=success_curves(self._trainer.state.log_history, self.by_environment),
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run does."""
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in PACKAGES
    }


def describe_run(
    trainer: StepGRPOTrainer,
    run: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of ``results.json``, and set the trainer's model card.

    `before` and `after` are the evaluations before and after training; both may be empty.
    """
    results = {
        **run,
        **_measured(before, after),
        **_by_environment(trainer, before, after),
        "steps": trainer.state.global_step,
        "seconds": round(trainer.training_seconds, 2),
        "num_processes": trainer.accelerator.num_processes,
        "num_parameters": trainer.accelerator.unwrap_model(trainer.model).num_parameters(),
        **{name: v for each in trainer.extensions for name, v in each.results().items()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    trainer.model_card = _model_card(results, trainer.args.hub_model_id or trainer.args.output_dir)
    return results


def _measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "return_before": before.get("return"),
        "return_after": after.get("return"),
        "num_eval_episodes": after.get("num_episodes", 0),
    }


def _by_environment(
    trainer: StepGRPOTrainer, before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of each of several environments.

    ``of_in_domain`` is the success in an evaluation-only environment relative to the trained ones.
    """
    if (evaluated := trainer.training_log.evaluated) is None:
        return {}
    figures: dict[str, dict[str, Any]] = {}
    for name in evaluated.names:
        first, last = (measured.get("envs", {}).get(name, {}) for measured in (before, after))
        is_trained = name not in evaluated.variants
        figures[name] = {"is_trained": is_trained, **_measured(first, last)}
        if not is_trained and last and after.get("success"):
            figures[name]["of_in_domain"] = last["success"] / after["success"]
    return {"by_environment": figures}


def _model_card(results: Mapping[str, Any], name: str) -> str:
    model = results["model"]
    metadata = ModelCardData(
        base_model=None if model == EMBEDDED or Path(model).exists() else model,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["agent-r1", "reinforcement-learning", "trl", results["algorithm"]],
    )
    facts = {
        "base model": model,
        **{name: _text(results[name]) for name in _SOURCE if results.get(name)},
        "algorithm": results["algorithm"],
        "optimiser steps": results["steps"] or "in training",
        "success before training": _percent(results["success_before"]),
        "success after training": _percent(results["success_after"]),
        "evaluation episodes": results["num_eval_episodes"],
        "evaluated on": results["evaluated_on"],
        **{
            f"success on {name}, evaluation only": f"{_percent(figures['success_before'])} before, "
            f"{_percent(figures['success_after'])} after"
            for name, figures in results.get("by_environment", {}).items()
            if not figures["is_trained"]
        },
        **results["versions"],
    }
    return _CARD.format(
        metadata=metadata.to_yaml(),
        title=Path(name).name,
        table="\n".join(f"| {fact} | {value} |" for fact, value in facts.items()),
        command=results["command"],
        evaluate="\n".join(
            shlex.join(["agent-r1-eval", "--model", name, *options])
            for options in _eval_options(results)
        ),
    )


def _eval_options(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the options of ``agent-r1-eval`` for each environment or program."""
    if (program := results.get("program")) is not None:
        reward = ["--reward", results["reward"]] if results["reward"] else []
        yield ["--program", program, "--tasks", results["eval_tasks"] or results["tasks"], *reward]
        return
    single = {"id": results["env"], "kwargs": results.get("env_kwargs"),
              "eval_kwargs": results.get("eval_env_kwargs")}  # fmt: skip
    for member in results.get("envs") or [single]:
        kwargs = member["kwargs"] | member.get("eval_kwargs", {})
        yield ["--env", member["id"], *(["--env_kwargs", json.dumps(kwargs)] if kwargs else [])]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def write_results(
    trainer: StepGRPOTrainer, collector: SampleCollector, results: Mapping[str, Any]
) -> None:
    """Write all files into the output folder and print the table."""
    folder = Path(trainer.args.output_dir)
    write_json(folder / RESULTS_FILE, results)
    collector.by_environment = results.get("by_environment", {})
    plot_learning_curve(
        folder / "learning_curve.png",
        trainer.state.log_history,
        before=results["success_before"],
        after=results["success_after"],
        curves=success_curves(trainer.state.log_history, collector.by_environment),
    )
    collector.write_page()
    save_trajectories(folder / "trajectories.jsonl.gz", [s.trajectory for s in collector.samples])
    print_results(results, folder)


def print_results(results: Mapping[str, Any], folder: Path) -> None:
    """Print success and return before and after, of each environment too, and the files."""
    figures = results.get("by_environment", {})
    variants = [name for name in figures if not figures[name]["is_trained"]]
    columns = [Column(n, justify="right") for n in ("before", "after", "of in-domain")]
    names = f"{len(results.get('envs', ()))} environments"
    title = f"{results['algorithm']} on {results.get('program') or results.get('env') or names}"
    table = Table("", *columns[: 3 if variants else 2], title=title, min_width=60)
    for name, form in (("success", "{:.1%}"), ("return", "{:.3f}")):
        values = (results[f"{name}_before"], results[f"{name}_after"])
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))
    for name in [*(name for name in figures if name not in variants), *variants]:
        own = figures[name]
        label = f"  {name}, evaluation only" if name in variants else f"  {name}"
        shares = [own["success_before"], own["success_after"], own.get("of_in_domain")]
        shown = ["-" if share is None else f"{share:.1%}" for share in shares]
        table.add_row(label, *shown[: len(table.columns) - 1])
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
    for name, what in _FILES.items():
        if (folder / name).exists():
            console.print(f"{what:>20}: {folder / name}", highlight=False)
