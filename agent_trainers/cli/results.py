"""Output and files of a training run: figures, learning curve, trajectories, and the dry run.

In a dry run the trainer runs as usual, with its sampler, processes and critic, from the first
prompt to the gradient, and is stopped before the first optimiser step.
"""

import contextlib
import datetime
import importlib.metadata
import json
import platform
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import psutil
import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from agent_envs.core.command_line import counted
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError, RolloutError
from agent_trainers.cli.output_folder import EVALUATION_FILE, RESULTS_FILE
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.monitoring.report import plot_learning_curve, write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import (
    BatchRecord,
    Mark,
    TrajectorySample,
    choose,
    siblings,
    state_change,
    trained_samples,
)
from agent_trainers.recipes import RUN_SETTINGS
from agent_trainers.rollout.evaluation import confidence_interval
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trajectory import (
    TRAJECTORIES_FILE,
    Trajectory,
    plain_value,
    save_trajectories,
)

PACKAGES: Final = ("agent-r1", "gymnasium", "torch", "transformers", "trl", "accelerate")
SAMPLES_PER_BATCH: Final = 16
SAMPLES_ON_PAGE: Final = 8
NEWEST_ON_PAGE: Final = 3
PAGE: Final = "dry_run.html"
NUM_SAMPLES: Final = 8
MAX_GROUPS: Final = 10
MAX_MESSAGE_CHARS: Final = 400


LOGGERS: Final = {
    "tensorboard": TensorBoardCallback, "trackio": TrackioCallback, "wandb": WandbCallback,
}  # fmt: skip


class RunFiles(TrainerCallback):  # type: ignore[misc]
    """Writes what a run of ``agent-r1-train`` leaves in ``output_dir``, also of a Python program.

    That is results.json, learning_curve.png, trajectories.html, trajectory files and the model;
    with evaluation tasks, also the success before and after training::

        trainer.add_callback(RunFiles(trainer))
    """

    def __init__(
        self,
        trainer: StepGRPOTrainer,
        title: str = "training",
        facts: Mapping[str, Any] | None = None,
        *,
        every: int = 10,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set what the files contain.

        Args:
            trainer: The trainer, which gets the callback by ``add_callback``.
            title: Title of the page.
            facts: Descriptions of the run for results.json; of its environment by default.
            every: Optimiser steps between samples; 0 for the first and the last only.
            is_stopped: Whether the run was interrupted, at its end: then it has no results.
        """
        self._trainer = trainer
        self._title = title
        self._facts = facts
        self._every = every
        self._is_stopped = is_stopped
        self._started = time.perf_counter()
        self._batches: list[list[TrajectorySample]] = []
        self.results: dict[str, Any] = {}
        """The contents of results.json, once it is written."""
        self._folder = Path(trainer.args.output_dir)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate, unless the run resumes after its first evaluation."""
        measured = self._folder / EVALUATION_FILE
        if state.global_step and measured.exists():
            self._before = json.loads(measured.read_text(encoding="utf-8"))
            return
        self._before = self._evaluate()
        if state.is_world_process_zero:
            write_json(measured, self._before)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate again, and write results and model, unless the run was interrupted."""
        if self._is_stopped() or state.global_step == 0:
            call_loggers(self._trainer, "on_train_end")
            return
        after = self._evaluate()
        call_loggers(self._trainer, "on_train_end")  # writes out what they hold
        self.collect_evaluated("evaluation, after training")
        self._trainer.save_model()
        if state.is_world_process_zero:
            self._write_results(self._facts or self._describe(), after)

    def _write_results(self, facts: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Write results, curve, page and trajectories into the output folder."""
        trainer, before, evaluated = self._trainer, self._before, self._trainer.evaluated
        by_environment: dict[str, dict[str, Any]] = {}
        for name in evaluated.names:
            figures = _measured(before.get(name), after.get(name))
            by_environment[name] = {"is_trained": name not in evaluated.variants, **figures}
        results = {
            **facts,
            **_measured(before.get(""), after.get("")),
            **({"by_environment": by_environment} if by_environment else {}),
            "steps": trainer.state.global_step,
            "seconds": round(trainer.training_seconds, 2),
            "total_seconds": round(
                trainer.seconds_before_resume + time.perf_counter() - self._started, 2
            ),
            "num_processes": trainer.accelerator.num_processes,
            "num_parameters": trainer.accelerator.unwrap_model(trainer.model).num_parameters(),
            **{name: v for each in trainer.extensions for name, v in each.results().items()},
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        plot_learning_curve(
            self._folder / "learning_curve.png",
            trainer.state.log_history,
            before=results["success_before"],
            after=results["success_after"],
        )
        self.write_page()
        save_trajectories(self._folder / TRAJECTORIES_FILE, [s.trajectory for s in self.samples])
        trainer.create_model_card(model_name=self._folder.name)
        write_json(self._folder / RESULTS_FILE, results)  # last: only a finished run has results
        self.results = results

    def _evaluate(self) -> dict[str, Any]:
        started = time.perf_counter()
        figures = evaluate(self._trainer)
        self._trainer.started += time.perf_counter() - started  # no seconds of training
        return figures

    def _describe(self) -> dict[str, Any]:
        """Describe the run, also in settings.json, where ``agent-r1-eval --model`` finds it."""
        args, (first, *_) = self._trainer.args, self._trainer.trajectories["train"]
        facts: dict[str, Any] = {"env": first.env_id or None, "env_kwargs": first.env_kwargs}
        members = getattr(self._trainer.source, "members", ())
        if len(members) > 1:
            are_named = not any(callable(member.id) for member in members)
            envs = [member.as_json() for member in members] if are_named else None
            text = json.dumps(envs, default=plain_value, skipkeys=True)
            facts = {"env": None, "env_kwargs": {}, "envs": json.loads(text)}
        facts["model"] = self._trainer.model.config.name_or_path
        names = ("max_completion_length", "learning_rate", "seed")
        settings = facts | {name: getattr(args, name) for name in names}
        write_json(self._folder / RUN_SETTINGS, settings)
        return {**facts, "algorithm": args.advantage_estimator, "evaluated_on": "eval_dataset"}

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
            played = [sample.trajectory for sample in self._batches[-1]]
            path = self._folder / "trajectories" / f"step_{step:06d}.jsonl.gz"
            save_trajectories(path, played)
            self.write_page()
            log_trajectories(trainer, self._batches[-1])

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
        order = choose(record.trajectories, len(record.trajectories))
        chosen = dict.fromkeys([*shown.values(), *siblings(record.trajectories, order), *order])
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
            self._folder / "trajectories.html",
            self.samples,
            tokenizer=self._trainer.processing_class,
            title=self._title,
        )


def evaluate(trainer: StepGRPOTrainer) -> dict[str, Any]:
    """Return the figures of an evaluation: under "" those of the environments for training.

    Of several environments, also those of each under its name; nothing without evaluation tasks.
    """
    if trainer.eval_dataset is None:
        return {}
    # otherwise TensorBoard and trackio would start another run elsewhere; harmless when repeated
    call_loggers(trainer, "on_train_begin")
    trainer.evaluate()
    evaluated = trainer.evaluated
    scored = [
        (e.env, e.task_key, e.success, sum(e.rewards)) for e in evaluated.episodes if e.is_scorable
    ]
    episodes = pd.DataFrame(scored, columns=["env", "task", "success", "return"])
    if episodes.empty:
        raise RolloutError("No episode of the evaluation could be scored.")
    tables = {"": episodes}
    if evaluated.names:
        tables = {"": episodes[~episodes["env"].isin(evaluated.variants)]}
        tables |= {str(name): own for name, own in episodes.groupby("env")}
    return {name: _figures(own) for name, own in tables.items() if len(own)}


def _figures(episodes: pd.DataFrame) -> dict[str, Any]:
    """Return success and return with their confidence intervals, and the number of episodes."""
    figures: dict[str, Any] = {"num_episodes": len(episodes)}
    for name in ("success", "return"):
        pairs = [*zip(episodes["task"], episodes[name].astype(float), strict=True)]
        figures[name] = float(episodes[name].mean())
        figures[f"{name}_interval"] = confidence_interval(pairs)
    return figures


def call_loggers(trainer: Any, event: str) -> None:
    """Call the loggers of `report_to`."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, tuple(LOGGERS.values())):
            getattr(callback, event)(
                trainer.args, trainer.state, trainer.control, model=trainer.model,
                processing_class=trainer.processing_class,
            )  # fmt: skip


def log_trajectories(trainer: StepGRPOTrainer, samples: Sequence[TrajectorySample]) -> None:
    """Log the steps of sample trajectories to the loggers, as one table."""
    rows: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        trajectory, trained = sample.trajectory, sample.steps or ()
        for t, step in enumerate(trajectory.transitions):
            advantages = trained[t].advantages if trained else []
            rows.append(
                {
                    "step": trainer.state.global_step,
                    "group": trajectory.group_id,
                    "task": trajectory.task_id,
                    "episode": number,
                    "turn": t + 1,
                    "state": step.messages[-1]["content"],
                    "action": step.action,
                    "reward": step.reward,
                    "terms": json.dumps(step.reward_terms),
                    "advantage": float(np.mean(advantages)) if advantages else None,
                }
            )
    table = pd.DataFrame(rows)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer:
            text = textwrap.indent(table.to_string(index=False), "    ")  # Markdown's code
            callback.tb_writer.add_text("trajectories", text, trainer.state.global_step)
        for name in ("_wandb", "_trackio"):
            if backend := getattr(callback, name, None):
                backend.log({"trajectories": backend.Table(dataframe=table)})


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run does."""
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in PACKAGES
    }


def _measured(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the figures of an environment before and after training; None if not measured."""
    figures: dict[str, Any] = {
        f"{name}_{when}{kind}": (measured or {}).get(f"{name}{kind}")
        for name in ("success", "return")
        for when, measured in (("before", before), ("after", after))
        for kind in ("", "_interval")
    }
    return figures | {"num_eval_episodes": (after or {}).get("num_episodes", 0)}


def print_results(results: Mapping[str, Any], folder: Path) -> None:
    """Print success and return before and after, also of each environment, and the folder."""
    columns = [Column(name, justify="right") for name in ("before", "after")]
    where = results.get("program") or results.get("env") or "several environments"
    title = f"{results['algorithm']} on {where}"
    table = Table("", *columns, title=title, min_width=60)
    shown = [("success", results, "success", "{:.1%}"), ("return", results, "return", "{:.3f}")]
    for name, own in results.get("by_environment", {}).items():
        label = f"  {name}" + ("" if own["is_trained"] else ", evaluation only")
        shown.append((label, own, "success", "{:.1%}"))
    for label, own, kind, form in shown:
        table.add_row(label, *(_cell(own, f"{kind}_{when}", form) for when in ("before", "after")))
    effort = (
        f"{counted(results['steps'], 'optimiser step')} in {results['seconds']:.0f} s "
        f"({results['total_seconds']:.0f} s in all)"
    )
    table.caption = (
        f"95 % intervals; {counted(results['num_eval_episodes'], 'evaluation episode')}: "
        f"{results['evaluated_on']}; {effort}"
    )
    console = Console(markup=False)
    is_evaluated = results["success_before"] is not None or results["num_eval_episodes"] > 0
    console.print(table if is_evaluated else f"{title}: {effort}, without evaluation.")
    for alarm in results.get("hacking_alarms", ()):
        steps = f"steps {alarm['first_step']} to {alarm['last_step']}"
        console.print(f"Reward hacking? {steps}, {alarm['text']}", style="red", highlight=False)
    console.print(f"Model, metrics, figures and trajectories: {folder}", highlight=False)


def _cell(figures: Mapping[str, Any], name: str, form: str) -> str:
    """Return a figure with its confidence interval."""
    if (value := figures[name]) is None:
        return "-"
    interval = figures[f"{name}_interval"]
    ends = [form.format(end) for end in interval or ()]
    return form.format(value) + (f" ({' to '.join(ends)})" if ends else "")


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
    console = Console(markup=False, highlight=False)
    console.rule(Text(f"dry run: {title}", "bold"), align="left")
    groups: dict[str, Text] = {}
    for group_id, task_id, shown_return, style in episodes:
        groups.setdefault(group_id, Text(f"  {task_id:.40}:")).append(f" {shown_return}", style)
    console.print(
        f"{counted(len(groups), 'group')}, {counted(len(episodes), 'episode')}; "
        "returns, grey without advantage"
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
