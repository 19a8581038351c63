"""The gradient of a batch on merged rows against that on a row per step.

Synthetic trajectories of 4, 8 and 16 steps, the same on both sides. Both go through the trainer's
own way from trajectories to a gradient: rows, sorted by length, packed into micro-batches under a
token budget, loss, backward. Not timed: rollout (there is none) and the update of the weights.
"""

import tempfile
from typing import Any, Final

import numpy as np

from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trajectory import Trajectory
from benchmarks.performance.alternation import train_in_turns
from benchmarks.performance.comparison import compare
from benchmarks.performance.models import EMBEDDED, load_model, load_tokenizer, utilisation
from benchmarks.performance.settings import SEED, Settings
from benchmarks.performance.step_time import ENVIRONMENT
from benchmarks.performance.synthetic_trajectories import (
    RecordedRollout,
    make_trajectory,
    row_lengths,
)

TARGETS: Final = {4: 2.5, 8: 4.5, 16: 8.0}
"""How many times faster merged rows are to be, by number of steps."""


def measure_merging(settings: Settings) -> dict[str, Any]:
    """Return the speed-up by number of steps, for the larger model and the embedded policy."""
    return {
        str(num_steps): _measure(settings, settings.gradient_model, num_steps)
        | {"embedded": _measure(settings, EMBEDDED, num_steps)}
        for num_steps in settings.num_steps
    }


def make_trainer(
    settings: Settings, model: Any, folder: str, batches: list[list[Trajectory]], **options: Any
) -> StepGRPOTrainer:
    """Make a trainer whose rollout is `batches`; they are all of the same size."""
    config = StepGRPOConfig(
        output_dir=folder,
        advantage_estimator="grpo_step",
        per_device_train_batch_size=len(batches[0]),
        num_generations=len(batches[0]),
        max_tokens_per_micro_batch=settings.token_budget,
        max_completion_length=24,
        max_logprob_drift=None,  # nobody sampled these tokens
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        **settings.trainer_options,
        **options,
    )
    trainer = StepGRPOTrainer(
        model=model, env=ENVIRONMENT, args=config, processing_class=load_tokenizer()
    )
    trainer.player.rollouts["train"] = RecordedRollout(batches)
    return trainer


def _measure(settings: Settings, model_name: str, num_steps: int) -> dict[str, Any]:
    rng = np.random.default_rng([SEED, num_steps])
    batches = [
        [make_trajectory(num_steps, rng) for _ in range(settings.num_trajectories)]
        for _ in range(settings.rounds + 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: make_trainer(
                settings,
                load_model(model_name, settings.device),
                folder,
                batches,
                merge_steps=name == "merged",
                max_steps=settings.rounds + 1,
            )
            for name in ("merged", "rows")
        }
        steps = train_in_turns(trainers, settings.rounds)
    seconds = {name: [step.gradient_seconds for step in timed] for name, timed in steps.items()}
    merged_tokens = [sum(row_lengths(one)[-1] for one in batch) for batch in batches[1:]]
    row_tokens = sum(sum(row_lengths(one)) for batch in batches[1:] for one in batch)
    speed = np.median(np.array(merged_tokens) / np.array(seconds["merged"]))
    result = compare(
        seconds["merged"], seconds["rows"], target=TARGETS.get(num_steps, 1.0), is_speedup=True
    )
    return result | {
        "model": model_name,
        "merged_tokens": sum(merged_tokens) / settings.rounds,
        "row_tokens": row_tokens / settings.rounds,
        "token_ratio": row_tokens / sum(merged_tokens),
        "merged": utilisation(trainers["merged"].model, float(speed)),
    }
