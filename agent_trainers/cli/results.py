"""What a training run leaves behind: figures, a model card, a picture, a page, trajectories."""

import datetime
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
    """Keeps a few trajectories of some batches, as Parquet and on the page, while training runs.

    Those of the first and the last step, and of every so many between them.
    """

    def __init__(self, trainer: StepGRPOTrainer, title: str, every: int = 0) -> None:
        """Collect from `trainer` each `every` optimiser steps; 0: the first and the last only."""
        self._trainer = trainer
        self._title = title
        self._every = every
        self._batches: list[list[TrajectorySample]] = []
        self.by_environment: Mapping[str, Any] = {}
        """What is known of each of several environments, see `describe_run`."""

    @property
    def samples(self) -> list[TrajectorySample]:
        """What the page shows: a few of the first batch and of the newest."""
        shown = [*self._batches[:1], *self._batches[1:][-NEWEST_ON_PAGE:]]
        return [sample for batch in shown for sample in batch[:SAMPLES_ON_PAGE]]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep samples of the first and of the last step, and of those between that are due."""
        step = state.global_step
        if step in (1, state.max_steps) or (self._every and step % self._every == 0):
            self.collect_trained(step)

    def collect_trained(self, step: int) -> None:
        """Keep samples of the last training batch; every process must call it."""
        trainer = self._trainer
        record = trainer.last_batch
        if record is None:
            return
        played, watch = record.trajectories, trainer.watch
        samples = trained_samples(
            record,
            self._choose(played),
            label=f"training, step {step}",
            optimiser_step=step,
            new_logprobs=trainer.current_logprobs(),
            find_marks=watch.marks,
        )
        self._batches.append(samples)
        if trainer.accelerator.is_main_process:
            folder = Path(trainer.args.output_dir)
            path = folder / "trajectories" / f"step_{step:06d}.parquet"
            save_samples(path, samples, trainer.processing_class)
            self.write_page()

    def collect_evaluated(self, label: str) -> None:
        """Keep samples of what was evaluated last."""
        played = self._trainer.trajectories["eval"]
        step = self._trainer.state.global_step
        chosen = [played[i] for i in self._choose(played)]
        self._batches.append(
            [
                TrajectorySample(
                    label=f"{label}, {t.env}" if t.env else label,
                    trajectory=t,
                    optimiser_step=step,
                    marks=self._trainer.watch.marks(t),
                )
                for t in chosen
            ]
        )

    def _choose(self, played: Sequence[Trajectory]) -> list[int]:
        """Return the numbers of the samples: first one that shows each alarm, if any does."""
        watch = self._trainer.watch
        alarms = {alarm.sign for alarm in watch.active}
        shown: dict[str, int] = {}
        for i, trajectory in enumerate(played if alarms else ()):
            for mark in watch.marks(trajectory):
                if mark.sign in alarms:
                    shown.setdefault(mark.sign, i)
        chosen = [*shown.values(), *choose(played, SAMPLES_PER_BATCH)]
        return list(dict.fromkeys(chosen))[:SAMPLES_PER_BATCH]

    def write_page(self) -> None:
        """Write ``trajectories.html``."""
        write_trajectory_page(
            Path(self._trainer.args.output_dir) / "trajectories.html",
            self.samples,
            tokenizer=self._trainer.processing_class,
            title=self._title,
            curves=success_curves(self._trainer.state.log_history, self.by_environment),
        )


def describe_run(
    trainer: StepGRPOTrainer,
    run: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what ``results.json`` holds, and let the model card say so: `run`, what came of it.

    `before` and `after` are what was evaluated before and after training; both may be empty.
    """
    results = {
        **run,
        **_measured(before, after),
        **_by_environment(trainer, before, after),
        "steps": trainer.state.global_step,
        "seconds": round(trainer.training_seconds, 2),
        "num_processes": trainer.accelerator.num_processes,
        "num_parameters": trainer.accelerator.unwrap_model(trainer.model).num_parameters(),
        "hacking_alarms": [asdict(alarm) for alarm in trainer.watch.alarms],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    args = trainer.args
    trainer.model_card = _model_card(results, args.output_dir, args.hub_model_id)
    return results


def _measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "return_before": before.get("return"),
        "return_after": after.get("return"),
        "num_eval_episodes": after.get("num_episodes", 0),
    }


def versions() -> dict[str, str]:
    """Return the version of Python, and of each package that decides what a run does."""
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in PACKAGES
    }


def _by_environment(
    trainer: StepGRPOTrainer, before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what came of each of several environments that were evaluated; nothing of one alone.

    ``of_in_domain`` is the success of one that nothing was trained in over that of those that were.
    """
    evaluated = trainer.training_log.evaluated
    if evaluated is None:
        return {}
    figures: dict[str, dict[str, Any]] = {}
    for name in evaluated.names:
        first, last = (measured.get("envs", {}).get(name, {}) for measured in (before, after))
        is_variant = name in evaluated.variants
        figures[name] = {"is_trained": not is_variant, **_measured(first, last)}
        if is_variant and last and after.get("success"):
            figures[name]["of_in_domain"] = last["success"] / after["success"]
    return {"by_environment": figures}


def _model_card(results: Mapping[str, Any], output_dir: str, hub_model_id: str | None) -> str:
    """Return the text of ``README.md`` beside a trained model.

    `results` is what ``results.json`` holds; what is not known yet is None there.
    """
    model = results["model"]
    is_on_hub = model != EMBEDDED and not Path(model).exists()
    metadata = ModelCardData(
        base_model=model if is_on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["agent-r1", "reinforcement-learning", "trl", results["algorithm"]],
    )
    name = hub_model_id or output_dir
    played, evaluations = _describe_played(results)
    commands = "\n".join(
        shlex.join(["agent-r1-eval", "--model", name, *own]) for own in evaluations
    )
    facts = {
        "base model": model,
        **played,
        "algorithm": results["algorithm"],
        "optimiser steps": results["steps"] or "training goes on",
        "success before training": _percent(results["success_before"]),
        "success after training": _percent(results["success_after"]),
        "evaluation episodes": results["num_eval_episodes"],
        "evaluated on": results["evaluated_on"],
        **_variant_facts(results),
        **results["versions"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
{metadata.to_yaml()}
---
# {Path(name).name}

A language model trained by step-level reinforcement learning with Agent-R1 Gym.

| | |
|---|---|
{table}

Trained with:

```
{results["command"]}
```

Evaluate it with:

```
{commands}
```
"""


def _describe_played(results: Mapping[str, Any]) -> tuple[dict[str, str], list[list[str]]]:
    """Return facts of what was trained in, and the options by which each is measured again."""
    if (program := results.get("program")) is not None:
        tasks, reward = results["tasks"], results["reward"]
        eval_tasks = results["eval_tasks"] or tasks
        facts = {"program": program, "its tasks": tasks, "its reward": reward or "its own"}
        options = ["--program", program, "--tasks", eval_tasks]
        return facts, [[*options, "--reward", reward] if reward else options]
    if (members := results.get("envs")) is not None:
        facts = {
            f"environment {m['name']}": f"{m['id']}, weight {m['weight']:g}, "
            f"arguments {json.dumps(m['kwargs'])}"
            for m in members
        }
        return facts, [_options(m["id"], m["kwargs"] | m.get("eval_kwargs", {})) for m in members]
    eval_kwargs = results["env_kwargs"] | results["eval_env_kwargs"]
    facts = {
        "environment": results["env"],
        "its arguments in training": json.dumps(results["env_kwargs"]),
        "its arguments in evaluation": json.dumps(eval_kwargs),
    }
    return facts, [_options(results["env"], eval_kwargs)]


def _options(env_id: str, kwargs: Mapping[str, Any]) -> list[str]:
    return ["--env", env_id, *(["--env_kwargs", json.dumps(kwargs)] if kwargs else [])]


def _variant_facts(results: Mapping[str, Any]) -> dict[str, str]:
    """Return facts of each environment that was evaluated and never trained in."""
    return {
        f"success on {name}, never trained in": f"{_percent(figures['success_before'])} before, "
        f"{_percent(figures['success_after'])} after"
        for name, figures in results.get("by_environment", {}).items()
        if not figures["is_trained"]
    }


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _add_environments(table: Table, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to a table of before and after the success in each of several environments.

    A variant, never trained in, has a third figure: its success over that in-domain.
    """
    variants = [name for name in figures if not figures[name]["is_trained"]]
    for name in [*(name for name in figures if name not in variants), *variants]:
        own = figures[name]
        values = [own["success_before"], own["success_after"]]
        values += [own.get("of_in_domain")] if variants else []
        label = f"  {name}" if own["is_trained"] else f"  {name}, never trained in"
        table.add_row(label, *("-" if value is None else f"{value:.1%}" for value in values))


def write_results(
    trainer: StepGRPOTrainer, collector: SampleCollector, results: Mapping[str, Any]
) -> None:
    """Write everything into the output folder and print the table."""
    folder = Path(trainer.args.output_dir)
    write_json(folder / RESULTS_FILE, results)
    plot_learning_curve(
        folder / "learning_curve.png",
        trainer.state.log_history,
        before=results["success_before"],
        after=results["success_after"],
        curves=success_curves(trainer.state.log_history, results.get("by_environment", {})),
    )
    collector.by_environment = results.get("by_environment", {})
    collector.write_page()
    save_trajectories(folder / "trajectories.jsonl.gz", [s.trajectory for s in collector.samples])
    _print_table(results, folder)


def _print_table(results: Mapping[str, Any], folder: Path) -> None:
    figures = results.get("by_environment", {})
    names = ["before", "after"]
    if any(not own["is_trained"] for own in figures.values()):
        names.append("of in-domain")
    columns = [Column(name, justify="right") for name in names]
    members = results.get("envs", ())
    played = results.get("program") or results.get("env") or f"{len(members)} environments"
    table = Table("", *columns, title=f"{results['algorithm']} on {played}", min_width=60)
    for name, form in (("success", "{:.1%}"), ("return", "{:.3f}")):
        values = (results[f"{name}_before"], results[f"{name}_after"])
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))
    _add_environments(table, figures)
    table.caption = (
        f"{results['num_eval_episodes']} evaluation episodes: {results['evaluated_on']}; "
        f"{results['steps']} optimiser steps "
        f"in {results['seconds']:.0f} s ({results['total_seconds']:.0f} s in all)"
    )
    console = Console()
    console.print(table)
    for alarm in results["hacking_alarms"]:
        steps = f"steps {alarm['first_step']} to {alarm['last_step']}"
        console.print(f"Reward hacking? {steps}, {alarm['text']}", style="red", highlight=False)
    for name, what in (
        ("results.json", "figures"),
        ("learning_curve.png", "learning curve"),
        ("trajectories.html", "sample trajectories"),
        ("metrics.jsonl", "all that was logged"),
        ("model.safetensors", "trained model"),
        ("model.safetensors.index.json", "trained model"),
        ("adapter_model.safetensors", "trained adapters"),
    ):
        if not (folder / name).exists():
            continue  # the model lies in one file, in several, or beside its adapters
        console.print(f"{what:>20}: {folder / name}", highlight=False)
