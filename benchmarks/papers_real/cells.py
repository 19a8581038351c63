"""Rows of the comparison on real questions, and the commands that compute a cell."""

import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range, json_object
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.output_folder import RESULTS_FILE, RUN_SETTINGS
from agent_trainers.cli.train import parse_arguments
from agent_trainers.monitoring.metrics_log import METRICS_FILE, read_metrics
from agent_trainers.policies.models import fast_precision
from agent_trainers.small_models import SMALL_MODELS, prepare
from agent_trainers.trainers.config import has_critic
from agent_trainers.trajectory import Trajectory, load_trajectories
from benchmarks.grid import CommandFailedError, Grid, Result, read_json
from benchmarks.learning_run import check_distinct
from benchmarks.papers_real.questions import TEST_SETS, TRAIN_ENV, QuestionArguments

ENVIRONMENT: Final[Mapping[str, Any]] = {
    "top_k": 1,
    "max_episode_steps": 4,
    "tool_format": "tags",
    "parallel_calls": False,
    "system_prompt": "Answer the question. Search for one fact after the other: write <search> "
    "the query </search>, and what is found comes back inside <information> tags. End with your "
    "final answer, and nothing but the answer, as <answer> your answer </answer>.",
    "rewards": {"f1": 1.0, "new_gold_passage": 0.2, "format": 0.02, "repeated_query": 0.05},
}
"""Short episodes: a reference has 310 tokens of SmolLM2's; 1,360 with the defaults."""
_WARM_START: Final = (
    "--learning_rate 2e-4 --per_device_train_batch_size 8 --save_strategy steps --save_steps 4 "
    "--max_length 400"
)
_TRAINING: Final = (
    "--learning_rate 3e-5 --num_generations 8 --max_tokens_per_micro_batch 2048 "
    "--gradient_checkpointing false --num_eval_tasks 0 --save_steps 2 --save_total_limit 1"
)
_CRITIC: Final = "--bootstrap_truncated false --value_coef 0.1"
"""The turn limit is a rule of the task; the head shares a small model (see default_critic.yaml)."""
_METRICS: Final = ("exact_match", "f1", "gold_passage_recall", "num_tool_calls")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    name: str
    kind: Literal["base", "naive_rag", "warm_start", "trained"] = "trained"
    algorithm: str = ""
    options: str = ""
    """Further options of ``agent-r1-train``."""

    @property
    def has_seeds(self) -> bool:
        """Whether it is trained, so that its result depends on the seed."""
        return self.kind in ("warm_start", "trained")


ROWS: Final = (
    Row("base tool call", "base"),
    Row("naive RAG", "naive_rag"),
    Row("warm start", "warm_start"),
    Row("step-GRPO", algorithm="grpo_step"),
    Row("GRPO", algorithm="grpo"),
    Row("PPO", algorithm="ppo"),
    Row("step-PPO", algorithm="step_ppo"),
    Row("REINFORCE++", algorithm="reinforce++"),
    Row("RLOO", algorithm="rloo"),
    Row("GRPO, no loss mask", algorithm="grpo", options="--loss_mask false"),
    Row("PPO, no advantage mask", algorithm="ppo", options="--advantage_mask false"),
    Row("PPO, no mask", algorithm="ppo", options="--advantage_mask false --loss_mask false"),
)
"""In the order of the table."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A row with one seed."""

    row: Row
    seed: int

    @property
    def key(self) -> str:
        """Name of its folder."""
        name = self.row.name.lower().replace(",", "").replace(" ", "-")
        return f"{name}-{self.seed}" if self.row.has_seeds else name


def wanted_cells(names: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of some rows in their order: the first seed of all, then the second.

    Untrained rows have one cell. A trained row starts from the warm start of its seed, which
    comes with it.

    Raises:
        ConfigurationError: If there is no such row.
    """
    rows = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in rows]:
        raise ConfigurationError(f"--rows: unknown row {unknown[0]!r}. Rows: {', '.join(rows)}.")
    if any(rows[name].kind == "trained" for name in names):
        names = ["warm start", *names]
    cells = [Cell(rows[name], seed) for seed in seeds for name in dict.fromkeys(names)]
    return [cell for cell in cells if cell.row.has_seeds or cell.seed == seeds[0]]


@dataclass
class PapersRealArguments(QuestionArguments):
    """Options of the command."""

    model: str = HfArg(
        default="smollm2", help="A model as agent-r1-train takes it, or smollm2, which is prepared."
    )
    rows: list[str] = HfArg(
        default_factory=lambda: [row.name for row in ROWS],
        help="Rows to run, in this order.",
    )
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds of each trained row.")
    budget: int = HfArg(default=4_800, help="Environment steps of training per trained row.")
    num_demonstrations: int = HfArg(
        default=256, help="Training questions demonstrated to the warm start."
    )
    num_tried: int = HfArg(
        default=32, help="Training questions that choose naive RAG's number of passages."
    )
    max_completion_length: int = HfArg(
        default=96, help="Longest turn in tokens; that of a reference has 97 of SmolLM2's."
    )
    batch_size: int = HfArg(
        default=32,
        help="Episodes of an optimiser step, and of a test batch. Where train_options spread a "
        "batch over processes, their product must be this.",
    )
    env_kwargs: str | None = HfArg(
        default=None, help="Arguments of the environments that differ, as JSON."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = HfArg(
        default="auto",
        help="Precision of training and evaluation; auto: bfloat16 on an accelerator or a CPU "
        "with its instructions.",
    )
    warm_start_options: str = HfArg(default="", help="Further options of agent-r1-sft, one text.")
    train_options: str = HfArg(default="", help="Further options of agent-r1-train, as one text.")
    jobs: int = HfArg(default=2, help="Cells at the same time, on one core each.")
    work: str = HfArg(default="runs/papers_real", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the table.")

    def __post_init__(self) -> None:
        """Check numbers and seeds.

        Raises:
            ConfigurationError: If one is out of range.
        """
        super().__post_init__()
        names = ("budget", "num_demonstrations", "num_tried", "batch_size", "jobs")
        check_range(self, "at least 1", *names)
        check_distinct("seeds", self.seeds)
        if self.dtype == "auto":
            is_fast = torch.accelerator.is_available() or fast_precision()
            self.dtype = "bfloat16" if is_fast else "float32"


class CellRunner:
    """Computes cells by the launchers' commands; finished parts of a cell are kept."""

    def __init__(self, grid: Grid, options: PapersRealArguments) -> None:
        """Prepare the model if necessary."""
        self._grid, self._options = grid, options
        model = options.model
        self._model = str(prepare(model)) if model in SMALL_MODELS else model
        self._environment = {**ENVIRONMENT, **json_object(options.env_kwargs, "--env_kwargs")}
        self._check_train_options()

    @property
    def protocol(self) -> dict[str, Any]:
        """What all cells depend on besides the options."""
        return {
            "environment": self._environment,
            "warm_start": _WARM_START,
            "training": _TRAINING,
            "critic": _CRITIC,
        }

    def compute(self, cell: Cell) -> Result:
        """Return the result of a cell.

        Raises:
            CommandFailedError: If a command fails, or an episode because of an error outside the
                model.
        """
        folder = self._grid.work / cell.key
        curve: list[dict[str, float]] = []
        model = self._model
        if cell.row.kind == "naive_rag":
            self._run_naive_rag(folder)
        else:
            if cell.row.kind == "warm_start":
                self._warm_up(cell, folder)
            elif cell.row.kind == "trained":
                curve = self._train(cell, folder)
            model = model if cell.row.kind == "base" else str(folder / "model")
            for name in TEST_SETS:
                if not (episodes := folder / f"{name}.jsonl.gz").exists():
                    self._test(model, name, episodes)
        scores = {name: _scores(folder / f"{name}.jsonl.gz") for name in TEST_SETS}
        for checkpoint in folder.glob("model/checkpoint-*"):  # three times as large as the model
            shutil.rmtree(checkpoint)
        commands = read_json(folder / "commands.json", [])
        return {
            "row": cell.row.name,
            "seed": cell.seed,
            "scores": scores,
            "environment_steps": curve[-1]["environment_steps"] if curve else 0,
            "curve": curve,
            "form": read_json(folder / "form.json", None),
            "commands": commands,
            "seconds": round(sum(each["seconds"] for each in commands), 1),
        }

    def next_max_steps(self, rounds: Sequence[Mapping[str, float]]) -> int | None:
        """Return the optimiser steps to train for next; None when the budget is spent.

        The number of environment steps in a batch is not known in advance: the first round is as
        long as it surely fits, and further ones assume the mean batch so far.
        """
        budget = self._options.budget
        if not rounds:
            longest = self._options.batch_size * int(self._environment["max_episode_steps"])
            return max(1, budget // longest)
        last = rounds[-1]
        remaining = budget - last["environment_steps"]
        if remaining <= 0:
            return None
        per_batch = last["environment_steps"] / last["max_steps"]
        return int(last["max_steps"]) + math.ceil(remaining / per_batch)

    def _check_train_options(self) -> None:
        """Raise a `ConfigurationError` if `_learning_curve` could not count environment steps."""
        options = [*_TRAINING.split(), *self._train_options()]
        settings, config = parse_arguments(["--model", self._model, *options])
        size = config.generation_batch_size * (settings.num_processes or 1)
        if size != self._options.batch_size:
            raise ConfigurationError(
                f"--train_options: a batch has {size} episodes, but --batch_size is "
                f"{self._options.batch_size}. Processes times --per_device_train_batch_size times "
                "--steps_per_generation must be that."
            )
        if config.logging_steps != 1 or (
            config.steps_per_generation != config.gradient_accumulation_steps
        ):
            raise ConfigurationError(
                "--train_options: a batch must be one optimiser step, which is logged "
                "(--logging_steps 1, --steps_per_generation as --gradient_accumulation_steps)."
            )

    def _train_options(self) -> list[str]:
        return [
            "--max_completion_length", str(self._options.max_completion_length),
            "--per_device_train_batch_size", str(self._options.batch_size),
            "--bf16", str(self._options.dtype == "bfloat16"),
            *shlex.split(self._options.train_options),
        ]  # fmt: skip

    def _warm_up(self, cell: Cell, folder: Path) -> None:
        done = folder / "trained.json"
        if done.exists():
            return
        is_started = any(folder.glob("model/checkpoint-*"))
        self._grid.command(
            [
                "agent-r1-sft", "--model", self._model, *self._environment_options("train"),
                "--num_tasks", str(self._options.num_demonstrations), *_WARM_START.split(),
                "--bf16", str(self._options.dtype == "bfloat16"),
                *shlex.split(self._options.warm_start_options), "--seed", str(cell.seed),
                "--output_dir", str(folder / "model"), *(["--resume"] if is_started else []),
            ],
            folder,
        )  # fmt: skip
        write_json(done, {})

    def _train(self, cell: Cell, folder: Path) -> list[dict[str, float]]:
        warm_start = self._grid.work / f"warm-start-{cell.seed}"
        if not (warm_start / "trained.json").exists():
            raise CommandFailedError(
                f"{cell.key}: {warm_start} holds no trained model, from which all rows of seed "
                f"{cell.seed} start. Run another seed, or all rows of this one again."
            )
        rounds = read_json(folder / "rounds.json", [])
        while (max_steps := self.next_max_steps(rounds)) is not None:
            if not _is_trained(folder / "model", max_steps):  # the call before this one was killed
                self._grid.command([
                    "agent-r1-train", "--model", str(warm_start / "model"),
                    "--algorithm", cell.row.algorithm, *self._environment_options("train"),
                    *_TRAINING.split(),
                    *(_CRITIC.split() if has_critic(cell.row.algorithm) else ()),
                    *cell.row.options.split(), *self._train_options(),
                    "--seed", str(cell.seed), "--max_steps", str(max_steps),
                    "--output_dir", str(folder / "model"),
                    *(["--resume"] if (folder / "model").is_dir() else []),
                ], folder)  # fmt: skip
            curve = self._learning_curve(folder / "model")
            rounds.append({"max_steps": max_steps, **curve[-1]})
            write_json(folder / "rounds.json", rounds)
        return self._learning_curve(folder / "model")

    def _test(self, model: str, name: str, episodes: Path) -> None:
        self._grid.command(
            [
                "agent-r1-eval", "--model", model, *self._environment_options(name), "--greedy",
                "--num_tasks", str(self._options.num_test),
                "--max_completion_length", str(self._options.max_completion_length),
                "--batch_size", str(self._options.batch_size), "--dtype", self._options.dtype,
                "--trajectories", str(episodes),
            ],
            episodes.parent,
        )  # fmt: skip

    def _run_naive_rag(self, folder: Path) -> None:
        spec = {
            "model": self._model,
            "dtype": self._options.dtype,
            "max_new_tokens": self._options.max_completion_length,
            "batch_size": self._options.batch_size,
            "num_tried": self._options.num_tried,
            "num_tasks": self._options.num_test,
            "train_env_kwargs": self._env_kwargs("train") | {"max_episode_steps": 2},
            "test": {
                name: (test_set.env, self._env_kwargs(name) | {"max_episode_steps": 2})
                for name, test_set in TEST_SETS.items()
            },
        }
        module = "benchmarks.papers_real.naive_rag"
        self._grid.command(["python", "-m", module, str(folder), json.dumps(spec)], folder)

    def _environment_options(self, name: str) -> list[str]:
        env = TRAIN_ENV if name == "train" else TEST_SETS[name].env
        return ["--env", env, "--env_kwargs", json.dumps(self._env_kwargs(name))]

    def _env_kwargs(self, name: str) -> dict[str, Any]:
        folder = self._grid.work / "questions"
        data = {"data": str(folder / f"{name}.jsonl"), "corpus": str(folder / "passages.jsonl")}
        return {**data, **self._environment}

    def _learning_curve(self, folder: Path) -> list[dict[str, float]]:
        """Return environment steps so far and batch metrics after each optimiser step."""
        curve: list[dict[str, float]] = []
        num_steps = 0.0
        for entry in read_metrics(folder / METRICS_FILE):
            if "episodes/mean_turns" in entry:
                num_steps += entry["episodes/mean_turns"] * self._options.batch_size
                metrics = {name: entry.get(f"metrics/{name}", 0.0) for name in _METRICS}
                curve.append({"environment_steps": round(num_steps), **metrics})
        return curve


def _is_trained(folder: Path, max_steps: int) -> bool:
    settings = read_json(folder / RUN_SETTINGS, {})
    return settings.get("max_steps") == max_steps and (folder / RESULTS_FILE).exists()


def _scores(path: Path) -> dict[str, list[float]]:
    """Return metrics by task; delete the file if not all of its episodes could be scored."""
    episodes = load_trajectories(path)
    if failed := [each for each in episodes if not each.is_scorable]:
        path.unlink()
        raise CommandFailedError(
            f"{path}: {len(failed)} of {len(episodes)} episodes failed because of errors outside "
            f"the model; the next call plays them again. The first error: {failed[0].error}"
        )
    return {
        **{name: [e.metrics.get(name, 0.0) for e in episodes] for name in _METRICS},
        "num_turns": [float(len(e.transitions)) for e in episodes],
        "num_tokens": [float(_num_tokens(e)) for e in episodes],
    }


def _num_tokens(episode: Trajectory) -> int:
    last = episode.transitions[-1] if episode.transitions else None
    return len(last.prompt_ids) + len(last.completion_ids) if last else 0
