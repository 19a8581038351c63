"""The policies that batches are of: one before training, and two on the way, for each seed.

They come from runs that are part of the benchmark anyway: how well an estimator trains at equal
environment steps. The run of `STAGES_OF` keeps its weights when its batches first solve enough.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
from transformers import TrainerCallback

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.tool_env import ENDLESS
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.algorithms.advantages import needs_values
from agent_trainers.cli.environments import count_tasks, environment_maker
from agent_trainers.cli.train import make_trainer
from agent_trainers.cli.train_options import parse_arguments
from agent_trainers.make_tiny_policy import own
from agent_trainers.make_tiny_policy.lessons import EnvironmentLessons
from agent_trainers.policies.local import TokenPolicy, local_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.recipes import MODEL_RECIPE, find_turn_length
from agent_trainers.rollout.evaluation import evaluate_policy
from benchmarks.learning_run import LONG_HORIZON, MULTI_HOP, EnvironmentStepBudget, teach
from benchmarks.trl_peer import played_by_ours

STAGES_OF: Final = "grpo_step"
"""The algorithm whose run the stages are of."""
STAGES: Final[Mapping[str, float]] = {"start": 0.0, "middle": 0.4, "late": 0.7}
"""A stage is the policy after the first batch of which at least this share was solved. Where none
was, the middle one is that of half of the budget, and the late one the last."""
WARM_SUCCESS: Final = 0.3
"""Of a policy that is made for an environment: what it may solve before reinforcement learning."""
_LEARNING_RATE: Final = 1e-3


def _make_own(environment: "Environment", folder: Path, **options: int) -> None:
    make_env = environment_maker(environment.env, environment.kwargs)
    lessons = EnvironmentLessons(f"--env {environment.env}", make_env)
    own.make(lessons, folder, success=WARM_SUCCESS, **options)


class Environment(NamedTuple):
    """An environment of the benchmark."""

    env: str
    kwargs: Mapping[str, Any] = {}
    eval_kwargs: Mapping[str, Any] = {}
    make_start: Callable[["Environment", Path], None] | None = _make_own
    """Saves the policy that training begins with; None for the embedded one, which knows the words
    of its environment."""
    num_episodes: int = 128
    """Of a batch, in training."""


ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "multi-hop": Environment(MULTI_HOP, {}, {"split": "test"}, None),
    "long horizon": Environment(
        LONG_HORIZON, {}, {"split": "test"}, lambda _, folder: teach(folder),
        num_episodes=32,  # 128 are ten updates elsewhere, and three here
    ),
    "arithmetic": Environment(
        "AgentR1/SyntheticArithmetic-v0", {}, {"split": "test"},
        partial(_make_own, num_tasks=2000, num_steps=800),  # fewer do not teach to copy a number
    ),
    "tables": Environment("AgentR1/SyntheticTable-v0", {}, {"split": "test"}),
}  # fmt: skip


def find_environment(name: str) -> Environment:
    """Return an environment by its name here, or by its Gymnasium id."""
    return ENVIRONMENTS[name] if name in ENVIRONMENTS else Environment(name)


def make_start(environment: Environment, folder: Path) -> Path:
    """Return the policy that training begins with; make it where there is none, and keep it."""
    if environment.make_start is None:
        return Path(TINY_POLICY)
    if not (folder / MODEL_RECIPE).exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        environment.make_start(environment, unfinished)
        unfinished.rename(folder)
    return folder


def train(
    environment: Environment,
    start: Path,
    folder: Path,
    *,
    algorithm: str,
    seed: int,
    budget: int,
    num_tasks: int,
) -> None:
    """Train for `budget` environment steps, keep what is asked for, and measure it.

    `algorithm` may be the import path of an estimator, which is trained as `grpo_step` is, or as
    `step_ppo` where it needs values. Writes ``result.json`` last: success on held-out tasks, and
    the learning curve. The run of `STAGES_OF` leaves a folder for each stage after the first.
    """
    started = time.perf_counter()
    options = [
        *_algorithm(algorithm),
        "--env", environment.env,
        "--env_kwargs", json.dumps(dict(environment.kwargs)),
        "--max_steps", str(max(1, budget // environment.num_episodes)),
        "--lr_scheduler_type", "constant",
        "--warmup_steps", "0",
        "--learning_rate", str(_LEARNING_RATE),
        "--per_device_train_batch_size", str(environment.num_episodes),
        "--num_eval_tasks", "0",
        "--save_strategy", "no",
        "--seed", str(seed),
        "--output_dir", str(folder / "trainer"),
        "--disable_tqdm", "true",
        *([] if start == Path(TINY_POLICY) else ["--model", str(start)]),
    ]  # fmt: skip
    settings, config = parse_arguments(options)
    trainer, _ = make_trainer(settings, config)
    played = partial(played_by_ours, trainer)
    steps = EnvironmentStepBudget(budget, played)
    trainer.add_callback(steps)
    stages = _KeepStages(trainer, start, folder, steps) if algorithm == STAGES_OF else None
    if stages is not None:
        trainer.add_callback(stages)
    trainer.train()
    if stages is not None:
        stages.keep_missing()
    policy = local_policy(
        trainer.model, trainer.processing_class, max_new_tokens=_turn_length(start)
    )
    success = measure(environment, policy, num_tasks, seed)
    shutil.rmtree(folder / "trainer", ignore_errors=True)
    write_json(folder / "result.json", {
        "algorithm": algorithm, "seed": seed, "budget": budget, "num_tasks": num_tasks,
        "success": success, "curve": steps.curve,
        "stages": stages.kept if stages is not None else {},
        "seconds": round(time.perf_counter() - started, 1),
    })  # fmt: skip


def _algorithm(name: str) -> list[str]:
    """Return the options of ``agent-r1-train`` for an algorithm, or for somebody's estimator."""
    if ":" not in name:
        return ["--algorithm", name]
    base = "step_ppo" if needs_values(name) else STAGES_OF
    return ["--algorithm", base, "--advantage_estimator", name]


def measure(environment: Environment, policy: TokenPolicy, num_tasks: int, seed: int) -> float:
    """Return the share of held-out tasks that a policy solves."""
    tasks: Sequence[int] = range(num_tasks)
    kwargs = {**environment.kwargs, **environment.eval_kwargs}
    make_env = environment_maker(environment.env, kwargs)
    if not environment.eval_kwargs:
        known = count_tasks(make_env)
        last = ENDLESS if known is None else known
        tasks = range(max(0, last - num_tasks), last)
    return evaluate_policy(make_env, policy, tasks, seed=seed).metrics.get("success", 0.0)


def load_stage(start: Path, runs: Path, stage: str, seed: int) -> tuple[Any, TokenPolicy]:
    """Return the model and the policy of a stage."""
    folder = start if stage == "start" else runs / f"{STAGES_OF}-{seed}" / stage
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    return model, local_policy(model, tokenizer, max_new_tokens=_turn_length(start))


def _turn_length(folder: Path) -> int | None:
    trained_for = find_turn_length(str(folder))
    return None if trained_for is None else trained_for.tokens


def batch_maker(environment: Environment) -> Callable[[], gym.Env[str, str]]:
    """Return what makes the environment in which batches are played."""
    return environment_maker(environment.env, environment.kwargs)


def draw_tasks(environment: Environment, num_tasks: int, seed: int) -> list[int]:
    """Return tasks of the environment, drawn by `seed`."""
    rng = np.random.default_rng([seed, 7])
    count = count_tasks(batch_maker(environment)) or ENDLESS
    drawn: list[int] = rng.choice(count, min(num_tasks, count), replace=False).tolist()
    return drawn


class _KeepStages(TrainerCallback):  # type: ignore[misc] # transformers is untyped
    """Keeps the weights after the first batch that solved enough."""

    def __init__(
        self, trainer: Any, start: Path, folder: Path, steps: EnvironmentStepBudget
    ) -> None:
        self._trainer, self._start, self._folder = trainer, start, folder
        self._steps = steps  # called before this one, so it knows of the batch
        self.kept: dict[str, float] = {}
        """Success of the batch by stage."""
        self._success = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Keep the policy where its last batch solved enough for a stage that is missing."""
        self._success = self._steps.curve[-1][1]
        for stage, enough in STAGES.items():
            is_late = stage == "middle" and self._steps.share_spent >= 0.5
            is_due = self._success >= enough or is_late
            if stage != "start" and stage not in self.kept and is_due:
                self._keep(stage)

    def keep_missing(self) -> None:
        """Keep the last policy for the stages that were never reached."""
        for stage in STAGES:
            if stage != "start" and stage not in self.kept:
                self._keep(stage)

    def _keep(self, stage: str) -> None:
        folder = self._folder / stage
        shutil.rmtree(folder, ignore_errors=True)
        self._trainer.model.save_pretrained(folder)
        self._trainer.processing_class.save_pretrained(folder)
        if (recipe := self._start / MODEL_RECIPE).exists():
            shutil.copyfile(recipe, folder / MODEL_RECIPE)
        self.kept[stage] = self._success
