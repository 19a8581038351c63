"""Asynchronous compared with synchronous runs: ``python -m benchmarks.performance.async_rollouts``.

Both train the embedded policy with the same seeds and tasks, interleaved. Search takes
``--latency`` seconds, or twenty times as long in 5 % of the calls, and no processor time. Printed
are the ratio of throughputs, final success on held-out tasks, and the Kolmogorov-Smirnov distance
of the lengths (in steps) of the episodes that were drawn and that were trained.
"""

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
from scipy.stats import ks_2samp
from transformers import TrainerCallback

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.trainers.grpo import StepGRPOTrainer
from benchmarks.performance.interleaved import measure_interleaved, seconds_of, spread
from benchmarks.performance.models import ENVIRONMENT, load_tokenizer, make_config, quieten
from benchmarks.performance.steps import SLOW, Waits

SLOW_SHARE: Final = 0.05
SLOW_FACTOR: Final = 20


class Run(NamedTuple):
    """Results of a run."""

    episodes_per_second: float
    success: float
    drawn: list[int]
    """Steps of each episode that started."""
    trained: list[int]
    """Steps of each episode that was trained."""
    staleness: list[float]
    """Mean of each optimiser step."""


def some_slow(seconds: float, rng: np.random.Generator) -> Waits:
    """Return latencies of `seconds`, `SLOW_FACTOR` times as long in `SLOW_SHARE` of the calls."""
    # not a generator, which two threads cannot enter at once
    return Waits(iter(lambda: seconds * (SLOW_FACTOR if rng.random() < SLOW_SHARE else 1), None))


class Counted(gym.Wrapper[str, str, str, str]):
    """Appends the number of steps of each episode that starts to a list."""

    def __init__(self, env: gym.Env[str, str], lengths: list[int]) -> None:
        """Append to `lengths`, which other environments share."""
        super().__init__(env)
        self._lengths = lengths

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        self._number = len(self._lengths)
        self._lengths.append(0)
        return super().reset(**options)

    def step(self, action: str) -> Any:
        """Count the step."""
        self._lengths[self._number] += 1
        return super().step(action)


class _Trained(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: StepGRPOTrainer) -> None:
        self._trainer = trainer
        self.lengths: list[int] = []
        self._batch: object = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the episodes of a new batch, which may last several steps."""
        if self._trainer.last_batch is not self._batch:
            self._batch = self._trainer.last_batch
            self.lengths += [len(t.transitions) for t in self._trainer.trajectories["train"]]


def make_slow_env(latencies: Waits) -> gym.Env[str, str]:
    """Make the environment with a slow search; it differs in nothing else."""
    most = gym.spec(ENVIRONMENT).max_episode_steps
    return gym.make(SLOW, latencies=latencies, max_episode_steps=most)


def run(kind: str, seed: int, options: argparse.Namespace) -> Run:
    """Train with rollouts of a `kind`, and evaluate."""
    drawn: list[int] = []
    latency = some_slow(options.latency, np.random.default_rng(seed))
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "rollout": kind, "seed": seed, "max_steps": options.steps,
            "per_device_train_batch_size": options.episodes, "num_eval_tasks": 0,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        }  # fmt: skip
        if kind == "async":
            settings["max_staleness"] = options.max_staleness
        trainer = StepGRPOTrainer(
            str(TINY_POLICY), lambda: Counted(make_slow_env(latency), drawn), make_config(settings)
        )
        drawn.clear()  # of the trainer's look at the environment
        trained = _Trained(trainer)
        trainer.add_callback(trained)
        seconds = seconds_of(trainer.train)
    policy = transformers_policy(trainer.model, load_tokenizer())
    report = evaluate_policy(lambda: gym.make(ENVIRONMENT), policy, range(options.tasks))
    logs = trainer.state.log_history
    return Run(
        episodes_per_second=len(trained.lengths) / seconds,
        success=report.success_of_all,
        drawn=drawn,
        trained=trained.lengths,
        staleness=[log["sampling/staleness"] for log in logs if "sampling/staleness" in log],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=positive_int, default=5, help="number of pairs of runs")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--steps", type=positive_int, default=28, help="optimiser steps of a run")
    parser.add_argument("--episodes", type=positive_int, default=32, help="episodes of a step")
    parser.add_argument("--max_staleness", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of most calls")
    parser.add_argument("--tasks", type=positive_int, default=200, help="held-out tasks")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args(arguments)
    quieten()
    sides = {
        kind: functools.partial(lambda kind, seeds: run(kind, next(seeds), options), kind, seeds)
        for kind in ("sync", "async")
        for seeds in (itertools.count(options.first_seed),)
    }
    runs = measure_interleaved(sides, options.seeds, description="runs")
    pairs = list(zip(runs["async"], runs["sync"], strict=True))
    ratio = spread([ours.episodes_per_second / other.episodes_per_second for ours, other in pairs])
    drawn, trained = (
        [n for one in runs["async"] for n in getattr(one, name)] for name in ("drawn", "trained")
    )
    distance = float(ks_2samp(drawn, trained).statistic)
    median, low, high = (ratio[name] for name in ("median", "min", "max"))
    lines = [f"throughput, async / sync: {median:.2f} ({low:.2f} to {high:.2f})"]
    for kind, side in runs.items():
        success = ", ".join(f"{one.success:.1%}" for one in side)
        speed = statistics.median(one.episodes_per_second for one in side)
        staleness = statistics.mean(value for one in side for value in one.staleness)
        lines.append(
            f"{kind:6} {speed:6.2f} episodes/s, staleness {staleness:.2f}, success {success}"
        )
    lines.append(f"KS distance of drawn and trained lengths: {distance:.3f} (n = {len(trained)})")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output:
        everything = {kind: [one._asdict() for one in side] for kind, side in runs.items()}
        write_json(options.output, {"ratio": ratio, "ks_distance": distance, "runs": everything})


if __name__ == "__main__":
    main()
