"""What the table holds: its rows, and the commands that fill a cell."""

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.small_models import SMALL_MODELS, prepare
from agent_trainers.trainers.presets import has_critic
from benchmarks.papers_real.questions import (
    TEST_SETS,
    TRAIN_ENV,
    QuestionArguments,
    env_kwargs,
)

SHORT_PROMPT: Final = (
    "Answer the question. Search for one fact after the other: write <search> the query </search>, "
    "and what is found comes back inside <information> tags. End with your final answer, and "
    "nothing but the answer, as <answer> your answer </answer>."
)
ENVIRONMENT: Final[Mapping[str, Any]] = {
    "top_k": 1,
    "max_episode_steps": 4,
    "tool_format": "tags",
    "parallel_calls": False,
    "system_prompt": SHORT_PROMPT,
    "rewards": {"f1": 1.0, "new_gold_passage": 0.2, "format": 0.02, "repeated_query": 0.05},
}
"""Short episodes: 310 tokens of SmolLM2's when the reference plays; 1,360 with the defaults."""
WARM_START: Final = (
    "--learning_rate", "2e-4",
    "--per_device_train_batch_size", "8",
    "--save_strategy", "steps",
    "--save_steps", "4",
    "--max_length", "400",
)  # fmt: skip
TRAINING: Final = (
    "--learning_rate", "3e-5",
    "--num_generations", "8",
    "--max_tokens_per_micro_batch", "2048",
    "--gradient_checkpointing", "false",
    "--num_eval_tasks", "0",
    "--save_steps", "2",
    "--save_total_limit", "1",
)  # fmt: skip
CRITIC: Final = ("--bootstrap_truncated", "false", "--value_coef", "0.1")
"""The turn limit is a rule of the task; the head shares a small model (see default_critic.yaml)."""
_NO_LOSS_MASK: Final = ("--loss_mask", "false")
_NO_ADVANTAGE_MASK: Final = ("--advantage_mask", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table."""

    name: str
    kind: Literal["base", "naive_rag", "warm_start", "trained"]
    algorithm: str = ""
    """A name of ``--algorithm``."""
    options: tuple[str, ...] = ()
    """Further options of ``agent-r1-train``."""


ROWS: Final = (
    Row(name="base tool call", kind="base"),
    Row(name="naive RAG", kind="naive_rag"),
    Row(name="warm start", kind="warm_start"),
    Row(name="step-GRPO", kind="trained", algorithm="grpo_step"),
    Row(name="GRPO", kind="trained", algorithm="grpo"),
    Row(name="PPO", kind="trained", algorithm="ppo"),
    Row(name="step-PPO", kind="trained", algorithm="step_ppo"),
    Row(name="REINFORCE++", kind="trained", algorithm="reinforce++"),
    Row(name="RLOO", kind="trained", algorithm="rloo"),
    Row(name="GRPO, no loss mask", kind="trained", algorithm="grpo", options=_NO_LOSS_MASK),
    Row(name="PPO, no advantage mask", kind="trained", algorithm="ppo",
        options=_NO_ADVANTAGE_MASK),
    Row(name="PPO, no mask", kind="trained", algorithm="ppo",
        options=_NO_ADVANTAGE_MASK + _NO_LOSS_MASK),
)  # fmt: skip
"""In the order in which they are run: what tells most comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row with one seed: a unit of work with a folder of its own."""

    row: Row
    seed: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        name = self.row.name.lower().replace(",", "").replace(" ", "-")
        return f"{name}-{self.seed}" if self.row.kind == "trained" else name


def wanted_cells(names: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of some rows: the first seed of every row comes before the second of any.

    Rows that are not trained have one cell, and so has the warm start, which comes with any trained
    row: all of them begin with it.

    Raises:
        ConfigurationError: If there is no such row.
    """
    known = [row.name for row in ROWS]
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"--rows: there is no {unknown[0]!r}. Rows: {', '.join(known)}.")
    if any(row.name in names and row.kind == "trained" for row in ROWS):
        names = [*names, *(row.name for row in ROWS if row.kind == "warm_start")]
    cells = [Cell(row=row, seed=seed) for seed in seeds for row in ROWS if row.name in names]
    return [cell for cell in cells if cell.row.kind == "trained" or cell.seed == seeds[0]]


@dataclass
class PapersRealArguments(QuestionArguments):
    """What is compared, and how much of it."""

    model: str = HfArg(
        default="smollm2", help="A model as agent-r1-train takes it, or smollm2, which is prepared."
    )
    rows: list[str] = HfArg(
        default_factory=lambda: [row.name for row in ROWS],
        help="Rows to run; the table shows the others as not run.",
    )
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds of each trained row.")
    budget: int = HfArg(default=4_800, help="Environment steps that each trained row plays.")
    num_demonstrations: int = HfArg(
        default=256, help="Training questions that the warm start is shown."
    )
    num_tried: int = HfArg(
        default=32, help="Training questions that naive RAG's forms are tried on."
    )
    max_completion_length: int = HfArg(default=256, help="Longest turn in tokens.")
    batch_size: int = HfArg(
        default=32,
        help="Episodes of an optimiser step, and episodes that are tested at once. Where "
        "train_options spread a batch over processes, their product must be this.",
    )
    env_kwargs: str | None = HfArg(
        default=None, help="Arguments of the environments that differ, as JSON."
    )
    warm_start_options: str = HfArg(
        default="", help="Further options of agent-r1-sft, as one text."
    )
    train_options: str = HfArg(default="", help="Further options of agent-r1-train, as one text.")
    work: str = HfArg(default="runs/papers_real", help="Folder of the runs, done and under way.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the table.")

    def __post_init__(self) -> None:
        """Check numbers, and that something is asked for.

        Raises:
            ConfigurationError: If one is out of range.
        """
        super().__post_init__()
        for name in ("budget", "num_demonstrations", "num_tried", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(f"--{name} must be at least 1, not {value}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigurationError(f"--seeds must name one at least, and each once: {self.seeds}")


class Commands:
    """The commands of a table, over the questions in its folder."""

    def __init__(self, options: PapersRealArguments) -> None:
        """Prepare the model where it has to be.

        Raises:
            ConfigurationError: If the model cannot be prepared, or arguments are no JSON object.
        """
        self._options = options
        self.work, self.batch_size = Path(options.work), options.batch_size
        model = options.model
        self.model = str(prepare(model)) if model in SMALL_MODELS else model
        given = json_object(options.env_kwargs, "--env_kwargs")
        self._environment = {**ENVIRONMENT, **given}

    def next_length(self, rounds: Sequence[Mapping[str, float]]) -> int | None:
        """Return for how many optimiser steps to train next; None where the budget is spent.

        A batch plays as many environment steps as its episodes are long, which nobody knows before:
        the first round is as long as it can be without passing the budget, and each further one
        goes as far as batches of the mean length so far would.
        """
        budget = self._options.budget
        if not rounds:
            longest = self._options.batch_size * self._environment["max_episode_steps"]
            return max(1, budget // int(longest))
        last = rounds[-1]
        left = budget - last["environment_steps"]
        if left <= 0:
            return None
        per_batch = last["environment_steps"] / last["max_steps"]
        return int(last["max_steps"]) + math.ceil(left / per_batch)

    @property
    def warm_start(self) -> Path:
        """Where the model is that all trained rows begin with."""
        return self.work / "warm-start" / "model"

    def warm_up(self, folder: Path) -> list[str]:
        """Return the command of the warm start."""
        resume = ["--resume"] if any(folder.glob("model/checkpoint-*")) else []
        return [
            "agent-r1-sft",
            "--model", self.model,
            "--env", TRAIN_ENV,
            "--env_kwargs", json.dumps(self._kwargs("train")),
            "--num_tasks", str(self._options.num_demonstrations),
            *WARM_START,
            *shlex.split(self._options.warm_start_options),
            "--output_dir", str(folder / "model"),
            *resume,
        ]  # fmt: skip

    def train(self, cell: Cell, folder: Path, max_steps: int) -> list[str]:
        """Return the command that trains a cell for so many optimiser steps."""
        resume = ["--resume"] if (folder / "model").is_dir() else []
        return [
            "agent-r1-train",
            "--model", str(self.warm_start),
            "--algorithm", cell.row.algorithm,
            "--env", TRAIN_ENV,
            "--env_kwargs", json.dumps(self._kwargs("train")),
            "--max_completion_length", str(self._options.max_completion_length),
            "--per_device_train_batch_size", str(self._options.batch_size),
            *TRAINING,
            *(CRITIC if has_critic(cell.row.algorithm) else ()),
            *cell.row.options,
            *shlex.split(self._options.train_options),
            "--seed", str(cell.seed),
            "--max_steps", str(max_steps),
            "--output_dir", str(folder / "model"),
            *resume,
        ]  # fmt: skip

    def test(self, model: Path | str, name: str, episodes: Path) -> list[str]:
        """Return the command that plays a test set and writes its episodes."""
        return [
            "agent-r1-eval",
            "--model", str(model),
            "--env", TEST_SETS[name].env,
            "--env_kwargs", json.dumps(self._kwargs(name)),
            "--greedy",
            "--num_tasks", str(self._options.num_test),
            "--max_completion_length", str(self._options.max_completion_length),
            "--batch_size", str(self._options.batch_size),
            "--trajectories", str(episodes),
        ]  # fmt: skip

    def naive_rag(self, folder: Path) -> tuple[list[str], dict[str, Any]]:
        """Return the command of naive RAG, and what its folder's ``run.json`` says."""
        search_only = {"max_episode_steps": 2}
        spec = {
            "model": self.model,
            "max_new_tokens": self._options.max_completion_length,
            "batch_size": self._options.batch_size,
            "num_tried": self._options.num_tried,
            "num_tasks": self._options.num_test,
            "train_env_kwargs": self._kwargs("train") | search_only,
            "test": {
                name: (test_set.env, self._kwargs(name) | search_only)
                for name, test_set in TEST_SETS.items()
            },
        }
        return ["python", "-m", "benchmarks.papers_real.naive_rag", str(folder)], spec

    def _kwargs(self, name: str) -> dict[str, Any]:
        return env_kwargs(self.work / "questions", name, self._environment)


_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "agent-r1-sft": ("-m", "agent_trainers.cli.sft"),
    "agent-r1-train": ("-m", "agent_trainers.cli.train"),
    "agent-r1-eval": ("-m", "agent_trainers.cli.evaluate"),
    "python": (),
}


def in_this_interpreter(command: Sequence[str]) -> list[str]:
    """Return a command as this interpreter runs it, also where no scripts are installed."""
    return [sys.executable, *_MODULES[command[0]], *command[1:]]
