"""One learning run: train the embedded policy by one method, with one seed, then measure it.

``python -m benchmarks.learning_run FOLDER`` does what ``FOLDER/run.json`` says and writes
``FOLDER/result.json``; ``python -m benchmarks.learning_run FOLDER JSON`` writes ``run.json`` first.
"""

import contextlib
import functools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from transformers import AutoModelForCausalLM, TrainerCallback

from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.cli.train import make_trainer
from agent_trainers.cli.train_options import parse_arguments
from agent_trainers.make_tiny_policy.own import write_recipe
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.policy import Policy
from agent_trainers.recipes import MODEL_RECIPE
from agent_trainers.rollout.evaluation import evaluate_policy
from benchmarks.demonstrated import references, show
from benchmarks.naive_rag import NaiveRAG
from benchmarks.performance.models import load_tokenizer
from benchmarks.trl_peer import make_trl_trainer, played_by_ours

MULTI_HOP: Final = "AgentR1/SyntheticMultiHop-v0"
LONG_HORIZON: Final = "AgentR1/SyntheticLongHorizon-v0"
NUM_EPISODES: Final = 128
"""Episodes per optimiser step, as in the default run, where `LearningRun.options` say nothing."""
MAX_NEW_TOKENS: Final = 24
FIRST_SHOWN: Final = 20_000_000
"""Where the tasks begin whose references are shown; no run draws near it."""
TAUGHT: Final = 0.05
"""What the policy of `teach` has solved of its last batch."""
COLUMNS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "one hop": (MULTI_HOP, {"hops": 1}),
    "clean facts": (MULTI_HOP, {}),
    "outdated facts": (MULTI_HOP, {"outdated": 1.0}),
    "three questions": (LONG_HORIZON, {}),
}
"""Where a policy is measured: environment and arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRun:
    """What to train and measure."""

    method: str
    """A name of ``--algorithm``; ``trl`` for TRL's own trainer; ``base`` is not trained."""
    seed: int
    budget: int
    """Environment steps to train for; the batch that reaches it is the last one."""
    num_tasks: int
    """Held-out tasks per column."""
    columns: Sequence[str]
    env: str = MULTI_HOP
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Sequence[str] = ()
    """Further options of ``agent-r1-train``."""
    is_naive_rag: bool = False
    """Whether the policy reads what one search with the question finds, when it is measured."""
    num_shown: int = 0
    """References in the environment that are shown before: with its context, if it has one."""
    is_taught: bool = False
    """Whether it begins with the policy of `teach`."""
    first_task: int = 0
    """The first held-out task: settings are chosen on others than they are reported on."""


class EnvironmentStepBudget(TrainerCallback):  # type: ignore[misc]
    """Ends training after `budget` environment steps, with the learning rate falling to 0 by then.

    So methods whose episodes differ in length get the same budget, and the same schedule over it.
    """

    def __init__(
        self, budget: int, played: Callable[[], tuple[int, float]], until: float = math.inf
    ) -> None:
        """Count what `played` says of the last batch: environment steps, and mean success.

        A batch that is solved to the share `until` ends training, too.
        """
        self._budget, self._played, self._until = budget, played, until
        self.curve: list[tuple[int, float]] = []
        """Environment steps so far and success in the batch, per optimiser step."""

    @property
    def num_steps(self) -> int:
        """Environment steps so far."""
        return self.curve[-1][0] if self.curve else 0

    @property
    def share_spent(self) -> float:
        """How much of the budget is used; 1 at the end, or a little more."""
        return self.num_steps / self._budget

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Set the learning rate."""
        for group in objects["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * max(0.0, 1.0 - self.share_spent)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the batch; stop when the budget is spent."""
        num_steps, success = self._played()
        self.curve.append((self.num_steps + num_steps, success))
        control.should_training_stop = self.share_spent >= 1.0 or success >= self._until


class CompletionTokens(TrainerCallback):  # type: ignore[misc]
    """Counts the tokens that the policy wrote, those of branches included."""

    def __init__(self, trainer: Any) -> None:
        """Count those of each batch of `trainer`, one of ours."""
        self._trainer, self.count = trainer, 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count the batch."""
        batch = self._trainer.trajectories["train"]
        self.count += sum(sum(trajectory.lengths[trajectory.start :]) for trajectory in batch)


def run(folder: Path) -> None:
    """Do the run that `folder` describes."""
    spec = LearningRun(**json.loads((folder / "run.json").read_text(encoding="utf-8")))
    started = time.perf_counter()
    curve: list[tuple[int, float]] = []
    num_tokens: int | None = None
    start = TINY_POLICY
    if spec.num_shown:
        start = folder / "shown"
        make_env = functools.partial(gym.make, spec.env, **spec.env_kwargs)
        show(references(make_env, FIRST_SHOWN, spec.num_shown), start)
    if spec.is_taught:
        start = folder.parent / "taught"
        if not start.exists():
            teach(folder / "taught")
            with contextlib.suppress(OSError):  # another run was sooner
                (folder / "taught").rename(start)
    if spec.method == "base":
        model = AutoModelForCausalLM.from_pretrained(start)
    else:
        model, curve, num_tokens = train(spec, folder, start)
    model.eval()
    policy: Policy = transformers_policy(
        model, load_tokenizer(), max_new_tokens=MAX_NEW_TOKENS, max_batch_size=spec.num_tasks
    )
    if spec.is_naive_rag:
        policy = NaiveRAG(policy, load_tokenizer())
    write_json(
        folder / "result.json",
        {
            "run": asdict(spec),
            "scores": {name: measure(policy, name, spec) for name in spec.columns},
            "curve": curve,
            "completion_tokens": num_tokens,
            "seconds": round(time.perf_counter() - started, 1),
        },
    )


def teach(folder: Path) -> None:
    """Save a policy that was trained over the long horizon until it solved some of it.

    The embedded policy solves none, so runs from it differ most by when they first do.
    """
    options = ("--per_device_train_batch_size", "32", "--learning_rate", "0.002")
    spec = LearningRun(method="grpo_step", seed=2, budget=2400, num_tasks=0, columns=(),
                       env=LONG_HORIZON, options=options)  # fmt: skip
    model, curve, _ = train(spec, folder, until=TAUGHT)
    if curve[-1][1] < TAUGHT:
        raise RuntimeError(f"No batch was solved by {TAUGHT:.0%}: {curve}")
    shutil.rmtree(folder / "trainer")
    model.save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    write_recipe(folder / MODEL_RECIPE, MAX_NEW_TOKENS)


def train(
    spec: LearningRun, folder: Path, start: Path = TINY_POLICY, *, until: float = math.inf
) -> tuple[Any, list[tuple[int, float]], int | None]:
    """Train the policy of `start`; return the model, the learning curve, and tokens written.

    Ends when the budget is spent, or after a batch of which the share `until` was solved. Tokens
    are None for TRL's trainer, which does not say.
    """
    options = [
        *([] if start == TINY_POLICY else ["--config", "default", "--model", str(start)]),
        "--algorithm", "grpo" if spec.method == "trl" else spec.method,
        "--env", spec.env,
        "--env_kwargs", json.dumps(dict(spec.env_kwargs)),
        "--max_steps", str(max(1, spec.budget // NUM_EPISODES)),
        "--lr_scheduler_type", "constant",
        "--warmup_steps", "0",
        "--per_device_train_batch_size", str(NUM_EPISODES),
        "--num_eval_tasks", "0",
        "--save_strategy", "no",
        "--seed", str(spec.seed),
        "--output_dir", str(folder / "trainer"),
        *spec.options,
    ]  # fmt: skip
    settings, config = parse_arguments(options)
    tokens: CompletionTokens | None = None
    if spec.method == "trl":
        trainer, played = make_trl_trainer(spec.env, spec.env_kwargs, config, load_tokenizer())
    else:
        trainer, _ = make_trainer(settings, config)
        played = functools.partial(played_by_ours, trainer)
        tokens = CompletionTokens(trainer)
        trainer.add_callback(tokens)
    budget = EnvironmentStepBudget(spec.budget, played, until)
    trainer.add_callback(budget)
    trainer.train()
    return trainer.model, budget.curve, None if tokens is None else tokens.count


def measure(policy: Policy, column: str, spec: LearningRun) -> float:
    """Return the share of held-out tasks that `policy` solves."""
    env, kwargs = COLUMNS[column]
    context = {name: spec.env_kwargs[name] for name in ("context",) if name in spec.env_kwargs}
    evaluation = evaluate_policy(
        functools.partial(gym.make, env, split="test", **kwargs, **context),
        policy,
        range(spec.first_task, spec.first_task + spec.num_tasks),
        seed=spec.seed,
    )
    return evaluation.metrics["success"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    folder, *spec = sys.argv[1:] if arguments is None else arguments
    if spec:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder) / "run.json", asdict(LearningRun(**json.loads(spec[0]))))
    run(Path(folder))


if __name__ == "__main__":
    main()
