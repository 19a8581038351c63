"""Train the embedded policy by one method with one seed, then evaluate it.

``python -m benchmarks.learning_run FOLDER JSON`` runs a `LearningRun` given as JSON and writes
``FOLDER/result.json``.
"""

import functools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from transformers import AutoModelForCausalLM, TrainerCallback

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.scoring.statistics import MAX_EXACT_PERMUTATION
from agent_trainers import TINY_POLICY
from agent_trainers.cli.environments import read_source
from agent_trainers.cli.train import make_trainer, parse_arguments
from agent_trainers.policies import Generation, GenerationRequest, Policy, PolicyWrapper
from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trajectory import Trajectory, save_trajectories
from benchmarks.performance.models import load_tokenizer
from benchmarks.trl_peer import batch_of, make_trl_trainer

MULTI_HOP: Final = "AgentR1/SyntheticMultiHop-v0"
LONG_HORIZON: Final = "AgentR1/SyntheticLongHorizon-v0"
NUM_EPISODES: Final = 128
MAX_NEW_TOKENS: Final = 24
COLUMNS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "one hop": (MULTI_HOP, {"hops": 1}),
    "clean facts": (MULTI_HOP, {}),
    "outdated facts": (MULTI_HOP, {"outdated": 1.0}),
    "three questions": (LONG_HORIZON, {}),
}
"""Evaluations by name: environment and its arguments."""
_FORMAT: Final = TOOL_FORMATS["hermes"]
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAG: Final = re.compile(r"</?\w+>")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRun:
    """Settings of one run."""

    method: str
    """A value of ``--algorithm``; ``trl`` for TRL's own trainer; ``base`` for no training."""
    seed: int
    budget: int
    """Environment steps of training; the batch that reaches it is the last one."""
    counts_tokens: bool = False
    """Whether `budget` is a number of sampled tokens instead; see `Sampled`."""
    num_tasks: int
    """Held-out tasks per column."""
    columns: Sequence[str]
    env: str = MULTI_HOP
    """Environment of training."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    eval_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environments of all columns, such as the context of training."""
    start: str | None = None
    """Folder of the initial policy; None for the embedded one."""
    learning_rate: float | None = None
    """None for that of the recipe."""
    options: Sequence[str] = ()
    """Further options of ``agent-r1-train``."""
    is_naive_rag: bool = False
    """Whether the evaluated policy only reads the results of one search with the question."""
    first_task: int = 0
    """First held-out task; tuning uses other tasks than the report."""
    num_episodes: int = NUM_EPISODES
    """Episodes per optimiser step."""
    are_branches_free: bool = False
    """Whether environment steps of branches do not count."""
    until: float | None = None
    """Success at which training ends before its budget is spent."""
    window: int = 1
    """Last episodes whose success counts for `until`; see `window_batches`."""

    @property
    def window_batches(self) -> int:
        """Whole batches in the window, at least one."""
        return max(1, self.window // self.num_episodes)


class EnvironmentStepBudget(TrainerCallback):  # type: ignore[misc]
    """Stop training after `budget` environment steps, with linear decay of the learning rate.

    Methods whose episodes differ in length get the same budget and the same schedule over it.
    A `last_batch` that counts tokens makes it a budget of tokens.
    """

    def __init__(
        self,
        budget: int,
        last_batch: Callable[[], tuple[int, float]],
        until: float | None = None,
        num_batches: int = 1,
    ) -> None:
        """Count environment steps and success of each batch.

        A mean success of the last `num_batches` of `until` also stops training.
        """
        self._budget, self._last_batch = budget, last_batch
        self._until, self._num_batches = until, num_batches
        self.curve: list[tuple[int, float]] = []
        """Environment steps so far and success of the batch, per optimiser step."""

    @property
    def num_steps(self) -> int:
        """Environment steps so far."""
        return self.curve[-1][0] if self.curve else 0

    @property
    def share_spent(self) -> float:
        """Share of the budget spent; slightly above 1 at the end."""
        return self.num_steps / self._budget

    @property
    def has_succeeded(self) -> bool:
        """Whether the success that stops training was reached."""
        last = [success for _, success in self.curve[-self._num_batches :]]
        if self._until is None or len(last) < self._num_batches:
            return False
        return statistics.fmean(last) >= self._until

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Set the learning rate."""
        for group in objects["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * max(0.0, 1.0 - self.share_spent)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the batch and stop when the budget is spent."""
        num_steps, success = self._last_batch()
        self.curve.append((self.num_steps + num_steps, success))
        control.should_training_stop = self.share_spent >= 1.0 or self.has_succeeded


def num_tokens(trajectory: Trajectory) -> int:
    """Return the tokens that the policy sampled; prompts and observations do not count."""
    return int(trajectory.usage["completion_tokens"])


class Sampled(Extension):
    """Count the tokens or episodes that a run samples, and the success of the episodes.

    Those that dynamic sampling discards count.
    """

    def __init__(self, size: Callable[[Trajectory], int] = num_tokens) -> None:
        """Start at 0; `size` is what an episode counts."""
        self._size = size
        self._new: list[Trajectory] = []
        self._success = 0.0

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        step: tuple[int, int],
        reward_factors: Mapping[str, float],
    ) -> list[Trajectory]:
        """Collect episodes as the trainer does, and keep them until they are counted."""
        trajectories: list[Trajectory] = self.trainer.rollouts.collectors["train"].collect(specs)
        self._new += trajectories
        return trajectories

    def last_batch(self) -> tuple[int, float]:
        """Return the size of the episodes since the last call, and the last mean success."""
        new, self._new = self._new, []
        if new:  # a batch may serve several optimiser steps
            self._success = statistics.fmean(each.success for each in new)
        return sum(map(self._size, new)), self._success


class NaiveRAG(PolicyWrapper):
    """Search once with the question itself, then take the model's next text as the answer."""

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search in the first turn of a question."""
        if any(message["role"] == "assistant" for message in request.messages):
            return request
        question = request.messages[-1]["content"]
        return Generation(text=_FORMAT.write_call("search", {"query": question}))

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Format the generated text as the answer."""
        found = _ANSWER.search(generation.text)
        text = _TAG.sub("", found.group(1) if found else generation.text).strip()
        return replace(generation, text=_FORMAT.write_answer(text))


def run(spec: LearningRun, folder: Path) -> dict[str, Any]:
    """Train and evaluate as `spec` says; write and return the result."""
    started = time.perf_counter()
    trained: dict[str, Any] = {"curve": []}
    if spec.method == "base":
        model = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    else:
        trainer, budget = prepare(spec, folder)
        trainer.train()
        logged = [entry.get("clip_ratio/region_mean") for entry in trainer.state.log_history]
        clipped = [share for share in logged if share is not None]  # of trained tokens
        trained = {"curve": budget.curve, "clip_ratio": sum(clipped) / len(clipped)}
        model = trainer.model
    model.eval()
    policy: Policy = transformers_policy(
        model, load_tokenizer(), max_new_tokens=MAX_NEW_TOKENS, max_batch_size=spec.num_tasks
    )
    if spec.is_naive_rag:
        policy = NaiveRAG(policy)
    result = {
        "run": asdict(spec),
        "scores": {name: evaluate(policy, name, spec) for name in spec.columns},
        **trained,
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(folder / "result.json", result)
    return result


def check_seeds(seeds: Sequence[int], tuning_seeds: Sequence[int] | None = None) -> None:
    """Raise a `ConfigurationError` if seeds are used twice, or are too many for the test."""
    check_distinct("seeds", seeds)
    if tuning_seeds is not None:
        check_distinct("tuning_seeds", tuning_seeds)
    if shared := set(seeds) & set(tuning_seeds or ()):
        raise ConfigurationError(f"--seeds: {sorted(shared)} are those that choose learning rates.")
    if len(seeds) > MAX_EXACT_PERMUTATION:
        raise ConfigurationError(
            f"--seeds: the exact test takes at most {MAX_EXACT_PERMUTATION} seeds."
        )


def check_distinct(option: str, values: Sequence[float]) -> None:
    """Raise a `ConfigurationError` if an option has no values, or repeats one."""
    if not values or len(set(values)) < len(values):
        raise ConfigurationError(f"--{option}: give at least one, and each once: {list(values)}.")


def prepare(
    spec: LearningRun, folder: Path, counter: Sampled | None = None
) -> tuple[Any, EnvironmentStepBudget]:
    """Return the trainer of a run, and the callback that ends it.

    The budget is one of environment steps, or of what `counter` counts.
    """
    options = [
        "--algorithm", "grpo" if spec.method == "trl" else spec.method, "--env", spec.env,
        "--env_kwargs", json.dumps(dict(spec.env_kwargs)),
        "--max_steps", str(max(1, spec.budget // spec.num_episodes)),
        "--lr_scheduler_type", "constant", "--warmup_steps", "0",
        "--per_device_train_batch_size", str(spec.num_episodes), "--steps_per_generation", "1",
        "--num_eval_tasks", "0", "--save_strategy", "no", "--disable_tqdm", "true",
        "--seed", str(spec.seed), "--output_dir", str(folder / "trainer"),
        *(["--model", spec.start] if spec.start is not None else []),
    ]  # fmt: skip
    if spec.learning_rate is not None:
        options += ["--learning_rate", str(spec.learning_rate)]
    settings, config = parse_arguments([*options, *spec.options])
    if spec.method == "trl":
        trainer, last_batch = make_trl_trainer(spec.env, spec.env_kwargs, config, load_tokenizer())
    else:
        trainer, _ = make_trainer(settings, config, read_source(settings))
        last_batch = functools.partial(batch_of, trainer, are_branches_free=spec.are_branches_free)
    if spec.counts_tokens:
        if spec.method == "trl":
            raise ConfigurationError("counts_tokens: TRL's trainer discards the tokens it sampled.")
        counter = Sampled()
    if counter is not None:
        counter.attach(trainer)
        last_batch = counter.last_batch
    budget = EnvironmentStepBudget(spec.budget, last_batch, spec.until, spec.window_batches)
    trainer.add_callback(budget)
    return trainer, budget


def evaluate(policy: Policy, column: str, spec: LearningRun) -> float:
    """Return the success of `policy` on held-out tasks."""
    env, kwargs = COLUMNS[column]
    make_env = functools.partial(gym.make, env, split="test", **{**kwargs, **spec.eval_kwargs})
    tasks = range(spec.first_task, spec.first_task + spec.num_tasks)
    return evaluate_policy(make_env, policy, tasks, seed=spec.seed).metrics["success"]


def fine_tune(model: Path, episodes: Sequence[Trajectory], output: Path, *, epochs: int) -> Path:
    """Train a model on demonstrations, failed ones included, and return the folder `output`."""
    from agent_trainers.cli import sft

    file = output.with_suffix(".jsonl.gz")
    save_trajectories(file, episodes)
    sft.run([
        "--model", str(model), "--trajectories", str(file), "--keep_failures",
        "--learning_rate", "1e-3", "--per_device_train_batch_size", "32",
        "--num_train_epochs", str(epochs), "--save_strategy", "no", "--overwrite",
        "--disable_tqdm", "true", "--output_dir", str(output),
    ])  # fmt: skip
    return output


if __name__ == "__main__":
    run(LearningRun(**json.loads(sys.argv[2])), Path(sys.argv[1]))
