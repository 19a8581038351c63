"""Environments and policies of the credit benchmark.

Batches are of policies before training and at two later stages, for each seed. The stages are
checkpoints of the run of `STAGES_ALGORITHM`, which is part of the benchmark anyway.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from filelock import FileLock
from transformers import TrainerCallback

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.tool_env import ENDLESS
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.cli.environments import inspect_environment
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.recipes import MODEL_RECIPE, find_turn_length
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tiny_policy.make import EnvironmentSource, make_tiny_policy, write_recipe
from benchmarks.credit.measure import FittedCritic, Measurement
from benchmarks.credit.true_advantages import CreditBatch, folder_of, save_batches
from benchmarks.learning_run import (
    LONG_HORIZON,
    MAX_NEW_TOKENS,
    MULTI_HOP,
    EnvironmentStepBudget,
    LearningRun,
    prepare,
)

STAGES_ALGORITHM: Final = "grpo"
STAGES: Final[Mapping[str, float]] = {"middle": 0.4, "late": 0.7}
"""A stage after the start is the policy after the first batch with at least this success. If there
is none, the middle one is the policy at half of the budget, and the late one the last."""
STAGES_FILE: Final = "stages.json"
"""Success of the saved stages, and of each batch."""
WARM_SUCCESS: Final = 0.3
"""Success of a policy made for an environment before reinforcement learning."""
PRETRAINED_SUCCESS: Final = 0.2
"""Success in a batch at which the initial policy of the long horizon is saved."""


def _make_by_reward(environment: "Environment", folder: Path) -> None:
    """Save the embedded policy, trained until it solves some of the tasks.

    It solves none of the long horizon's before, and most runs would learn nothing.
    """
    run = LearningRun(
        method=STAGES_ALGORITHM, seed=2, budget=2400, num_tasks=0, columns=(), env=environment.env,
        env_kwargs=environment.kwargs, learning_rate=2e-3, num_episodes=environment.num_episodes,
        until=PRETRAINED_SUCCESS,
    )  # fmt: skip
    train_until(run, folder)


def train_until(run: LearningRun, folder: Path) -> None:
    """Train until the run's success is reached; save the policy with a recipe.

    Raises:
        RuntimeError: If it is not reached within the budget.
    """
    trainer, steps = prepare(run, folder)
    trainer.train()
    if not steps.has_succeeded:
        raise RuntimeError(f"Training did not reach a success of {run.until:.0%}: {steps.curve}")
    shutil.rmtree(folder / "trainer")
    trainer.model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    write_recipe(folder / MODEL_RECIPE, MAX_NEW_TOKENS)


def _make_own(environment: "Environment", folder: Path, **options: Any) -> None:
    source = EnvironmentSource(inspect_environment(environment.env, environment.kwargs))
    make_tiny_policy(source, folder, success=WARM_SUCCESS, **options)


class Environment(NamedTuple):
    """An environment of the benchmark."""

    env: str
    kwargs: Mapping[str, Any] = {}
    make_start: Callable[["Environment", Path], None] | None = _make_own
    """Saves the initial policy; None for the embedded one."""
    start_of: str = ""
    """Another environment of the benchmark whose initial policy this one takes."""
    num_episodes: int = 128
    """Episodes of a training batch."""
    learning_rate: float = 1e-3
    """Learning rate of the training run that gives the stages."""


ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "multi-hop": Environment(MULTI_HOP, make_start=None),
    "long horizon": Environment(
        LONG_HORIZON, make_start=_make_by_reward,
        num_episodes=32,  # batches of 128 are only three updates here
        learning_rate=3e-4,  # with more, one update jumps over the middle stage
    ),
    "arithmetic": Environment(
        "AgentR1/SyntheticArithmetic-v0",
        # fewer do not teach to copy a number
        make_start=partial(_make_own, num_tasks=2000, num_steps=800),
    ),
    "tables": Environment("AgentR1/SyntheticTable-v0"),
    "bifurcation": Environment(
        "AgentR1/SyntheticBifurcation-v0",
        {"steps": 5, "tool_format": "tags"},  # in 8 rooms hardly any history repeats
        # one of four doors decides: half of the right turns are a success of 62 %
        make_start=partial(_make_own, p_correct_turn=0.1),
    ),
    "coin": Environment(
        "AgentR1/TextWorldExpress-v0",
        {
            "game": "coin", "parameters": {"numLocations": 6, "includeDoors": 0}, "detours": True,
            "tool_format": "tags", "rewards": {"solved": 1.0}, "max_episode_steps": 8,
        },
        make_start=partial(_make_own, num_tasks=400, num_steps=80),
    ),
    "long horizon, outcome": Environment(
        LONG_HORIZON, {"rewards": {"all_correct": 1.0}}, start_of="long horizon",
        num_episodes=32, learning_rate=3e-4,
    ),
}  # fmt: skip


def find_environment(name: str) -> Environment:
    """Return an environment by its name here, or by its Gymnasium id."""
    return ENVIRONMENTS[name] if name in ENVIRONMENTS else Environment(name)


def make_start(name: str, work: Path) -> Path:
    """Return the folder of an environment's initial policy; make it if necessary."""
    environment = find_environment(name)
    if environment.start_of:
        return make_start(environment.start_of, work)
    if environment.make_start is None:
        return Path(TINY_POLICY)
    folder = work / folder_of(name) / "policy"
    with _making(folder, folder / MODEL_RECIPE) as unfinished:
        if unfinished is not None:
            environment.make_start(environment, unfinished)
    return folder


@contextlib.contextmanager
def _making(folder: Path, result: Path) -> Iterator[Path | None]:
    """Yield a folder to fill and rename to `folder`; None if it has its `result`.

    One process at a time: others wait.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if result.exists():
            yield None
            return
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        for old in (unfinished, folder):
            shutil.rmtree(old, ignore_errors=True)
        yield unfinished
        unfinished.rename(folder)


def compute(cell: Any, work: Path, batch_file: Path) -> None:
    """Measure a batch of a cell and save it; make what it needs and is not there yet.

    `cell` has the fields of `Cell` and the options of the command.
    """
    environment = find_environment(cell.environment)
    start = policy = make_start(cell.environment, work)
    if cell.stage != "start":
        folder = work / folder_of(cell.environment) / f"run-{cell.seed}"
        with _making(folder, folder / STAGES_FILE) as unfinished:
            if unfinished is not None:
                train(environment, start, unfinished, seed=cell.seed, budget=cell.budget)
        policy = folder / cell.stage
    save_batches(batch_file, [measure_batch(cell, environment, start, policy)])


def measure_batch(cell: Any, environment: Environment, start: Path, folder: Path) -> CreditBatch:
    """Roll out a batch of the policy in `folder` and measure its advantages.

    The critic is fitted to as many episodes of other tasks.
    """
    seed = cell.seed
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    trained_for = find_turn_length(str(start))
    max_new_tokens = None if trained_for is None else trained_for[0]
    policy = transformers_policy(model, tokenizer, max_new_tokens=max_new_tokens)
    found = inspect_environment(environment.env, environment.kwargs)
    tasks = _draw_tasks(found.num_tasks or ENDLESS, 2 * cell.num_tasks, seed)
    others, measured = tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]
    with contextlib.closing(Rollout(found.make_env, policy)) as rollout:
        collected = rollout.collect(_specs(others, cell.group_size, seed, 0))
        critic = FittedCritic(model, 0, [t for t in collected if t.is_scorable])
        batch = Measurement(rollout, _specs(measured, cell.group_size, seed, 1), seed)
        branches = batch.roll_out_visible_branches(cell.branch_steps)
        batch.measure(cell.reliability, cell.max_branches)
        return batch.batch(
            environment=cell.environment,
            stage=cell.stage,
            seed=seed,
            values=critic.values(batch.trajectories),
            branches=branches,
            model=model,
        )


def train(environment: Environment, start: Path, folder: Path, *, seed: int, budget: int) -> None:
    """Train for `budget` environment steps and save a folder for each stage after the first."""
    run = LearningRun(
        method=STAGES_ALGORITHM, seed=seed, budget=budget, num_tasks=0, columns=(),
        env=environment.env, env_kwargs=environment.kwargs, num_episodes=environment.num_episodes,
        learning_rate=environment.learning_rate,
        start=None if start == Path(TINY_POLICY) else str(start),
    )  # fmt: skip
    trainer, steps = prepare(run, folder)
    stages = SaveStages(trainer, start, folder, steps)
    trainer.add_callback(stages)
    trainer.train()
    stages.save_missing()
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    write_json(folder / STAGES_FILE, {"curve": steps.curve, "stages": stages.saved})


class SaveStages(TrainerCallback):  # type: ignore[misc] # transformers is untyped
    """Save the weights after the first batch with enough success for a stage."""

    def __init__(
        self, trainer: Any, start: Path, folder: Path, steps: EnvironmentStepBudget
    ) -> None:
        """Save below `folder`; `steps` must be called before this callback."""
        self._trainer, self._start, self._folder = trainer, start, folder
        self._steps = steps
        self.saved: dict[str, float] = {}
        """Success of the batch by stage."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Save the policy if a stage is due."""
        success = self._steps.curve[-1][1]
        for stage, enough in STAGES.items():
            is_half_way = stage == "middle" and self._steps.share_spent >= 0.5
            if stage not in self.saved and (success >= enough or is_half_way):
                self._save(stage)

    def save_missing(self) -> None:
        """Save the last policy for the stages that were not reached."""
        for stage in STAGES.keys() - self.saved.keys():
            self._save(stage)

    def _save(self, stage: str) -> None:
        folder = self._folder / stage
        shutil.rmtree(folder, ignore_errors=True)
        self._trainer.model.save_pretrained(folder)
        self._trainer.processing_class.save_pretrained(folder)
        if (recipe := self._start / MODEL_RECIPE).exists():
            shutil.copyfile(recipe, folder / MODEL_RECIPE)
        self.saved[stage] = self._steps.curve[-1][1]


def _draw_tasks(count: int, num_tasks: int, seed: int) -> list[int]:
    rng = np.random.default_rng([seed, 7])
    drawn: list[int] = rng.choice(count, min(num_tasks, count), replace=False).tolist()
    return drawn


def _specs(tasks: list[int], group_size: int, seed: int, number: int) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            task=task,
            seed=task,
            group_id=str(task),
            rng=np.random.default_rng([seed, number, task, member]),
        )
        for task in tasks
        for member in range(group_size)
    ]


if __name__ == "__main__":
    compute(SimpleNamespace(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
