"""Environments and policies of the credit benchmark.

Batches are of policies before training and at two later stages, for each seed. The stages are
checkpoints of the run of `STAGES_ALGORITHM`, which is part of the benchmark anyway.
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from transformers import TrainerCallback

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.tool_env import ENDLESS
from agent_trainers import TINY_POLICY
from agent_trainers.cli.environments import inspect_environment, read_source
from agent_trainers.cli.train import make_trainer, parse_arguments
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.recipes import MODEL_RECIPE, find_turn_length
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tiny_policy.make import EnvironmentSource, make_tiny_policy, write_recipe
from benchmarks.credit.measure import FittedCritic, Measurement
from benchmarks.credit.true_advantages import CreditBatch
from benchmarks.learning_run import (
    LONG_HORIZON,
    MAX_NEW_TOKENS,
    MULTI_HOP,
    EnvironmentStepBudget,
    train_options,
)
from benchmarks.trl_peer import batch_of

STAGES_ALGORITHM: Final = "grpo_step"
STAGES: Final[Mapping[str, float]] = {"middle": 0.4, "late": 0.7}
"""A stage after the start is the policy after the first batch with at least this success. If there
is none, the middle one is the policy at half of the budget, and the late one the last."""
WARM_SUCCESS: Final = 0.3
"""Success of a policy made for an environment before reinforcement learning."""
PRETRAINED_SUCCESS: Final = 0.05
"""Success in a batch at which the initial policy of the long horizon is saved."""


def _make_by_reward(environment: "Environment", folder: Path) -> None:
    """Save the embedded policy, trained until it solves some of the tasks.

    It solves none of the long horizon's before, and most runs would learn nothing.
    """
    trainer, steps = _make_trainer(
        environment, Path(TINY_POLICY), folder, 2, 2400,
        learning_rate=2e-3, until=PRETRAINED_SUCCESS,
    )  # fmt: skip
    trainer.train()
    if steps.curve[-1][1] < PRETRAINED_SUCCESS:
        raise RuntimeError(f"No batch reached a success of {PRETRAINED_SUCCESS:.0%}: {steps.curve}")
    shutil.rmtree(folder / "trainer")
    trainer.model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    write_recipe(folder / MODEL_RECIPE, MAX_NEW_TOKENS)


def _make_own(environment: "Environment", folder: Path, **options: int) -> None:
    source = EnvironmentSource(inspect_environment(environment.env, environment.kwargs))
    make_tiny_policy(source, folder, success=WARM_SUCCESS, **options)


class Environment(NamedTuple):
    """An environment of the benchmark."""

    env: str
    kwargs: Mapping[str, Any] = {}
    make_start: Callable[["Environment", Path], None] | None = _make_own
    """Saves the initial policy; None for the embedded one."""
    num_episodes: int = 128
    """Episodes of a training batch."""


ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "multi-hop": Environment(MULTI_HOP, make_start=None),
    "long horizon": Environment(
        LONG_HORIZON, make_start=_make_by_reward,
        num_episodes=32,  # batches of 128 are only three updates here
    ),
    "arithmetic": Environment(
        "AgentR1/SyntheticArithmetic-v0",
        # fewer do not teach to copy a number
        make_start=partial(_make_own, num_tasks=2000, num_steps=800),
    ),
    "tables": Environment("AgentR1/SyntheticTable-v0"),
}  # fmt: skip


def find_environment(name: str) -> Environment:
    """Return an environment by its name here, or by its Gymnasium id."""
    return ENVIRONMENTS[name] if name in ENVIRONMENTS else Environment(name)


def make_start(environment: Environment, folder: Path) -> Path:
    """Return the folder of the initial policy; make it if necessary."""
    if environment.make_start is None:
        return Path(TINY_POLICY)
    if not (folder / MODEL_RECIPE).exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        environment.make_start(environment, unfinished)
        unfinished.rename(folder)
    return folder


def measure_batch(
    cell: Any, environment: Environment, start: Path, folder: Path, options: Any
) -> CreditBatch:
    """Roll out a batch of the policy in `folder` and measure its advantages.

    The critic is fitted to as many episodes of other tasks.
    """
    seed = cell.seed
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    trained_for = find_turn_length(str(start))
    max_new_tokens = None if trained_for is None else trained_for[0]
    policy = transformers_policy(model, tokenizer, max_new_tokens=max_new_tokens)
    found = inspect_environment(environment.env, environment.kwargs)
    tasks = _draw_tasks(found.num_tasks or ENDLESS, 2 * options.num_tasks, seed)
    others, measured = tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]
    with contextlib.closing(Rollout(found.make_env, policy)) as rollout:
        collected = rollout.collect(_specs(others, options.group_size, seed, 0))
        critic = FittedCritic(model, 0, [t for t in collected if t.is_scorable])
        batch = Measurement(rollout, _specs(measured, options.group_size, seed, 1), seed)
        branches = batch.roll_out_visible_branches(options.branch_steps)
        batch.measure(options.reliability, options.max_branches)
        return batch.batch(
            environment=cell.environment,
            stage=cell.stage,
            seed=seed,
            values=critic.values(batch.trajectories),
            branches=branches,
        )


def train(
    environment: Environment, start: Path, folder: Path, *, seed: int, budget: int
) -> dict[str, Any]:
    """Train for `budget` environment steps and save a folder for each stage after the first."""
    trainer, steps = _make_trainer(environment, start, folder, seed, budget, learning_rate=1e-3)
    stages = SaveStages(trainer, start, folder, steps)
    trainer.add_callback(stages)
    trainer.train()
    stages.save_missing()
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    return {"curve": steps.curve, "stages": stages.saved}


def _make_trainer(
    environment: Environment, start: Path, folder: Path, seed: int, budget: int,
    *, learning_rate: float, until: float = math.inf,
) -> tuple[Any, EnvironmentStepBudget]:  # fmt: skip
    own_policy = [] if start == Path(TINY_POLICY) else ["--model", str(start)]
    options = train_options(
        method=["--algorithm", STAGES_ALGORITHM, *own_policy], env=environment.env,
        env_kwargs=environment.kwargs, seed=seed, budget=budget,
        num_episodes=environment.num_episodes, folder=folder,
    )  # fmt: skip
    settings, config = parse_arguments([*options, "--learning_rate", str(learning_rate)])
    trainer, _ = make_trainer(settings, config, read_source(settings))
    steps = EnvironmentStepBudget(budget, partial(batch_of, trainer), until)
    trainer.add_callback(steps)
    return trainer, steps


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
