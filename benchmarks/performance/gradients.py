"""Gradients of merged rows compared with a row per step.

The trajectories are synthetic: their context grows by a turn and an observation each step. They
take the trainer's own path to a gradient, without a rollout.
"""

import tempfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trajectory import StopReason, Trajectory, Transition
from benchmarks.performance.interleaved import StepTimer, compare, measure_interleaved
from benchmarks.performance.models import (
    ENVIRONMENT,
    SEED,
    Settings,
    load_model,
    load_tokenizer,
    utilisation,
)

PROMPT_TOKENS: Final = 250
"""HotpotQA's first state with the template of Qwen2.5 and one tool."""
ACTION_TOKENS: Final = 24
OBSERVATION_TOKENS: Final = 60
"""Longer observations reduce the gain of merging; see `token_ratio` in the results."""


class RecordedRollout:
    """A rollout that returns given trajectories."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the trajectories."""
        self._trajectories = trajectories

    def collect(self, specs: Sequence[EpisodeSpec], *_: Any, **__: Any) -> list[Trajectory]:
        """Return the trajectories."""
        return list(self._trajectories)

    def close(self) -> None:
        """Close nothing."""


def measure_merging(settings: Settings) -> dict[str, Any]:
    """Return the time of merged rows over that of separate rows, by number of steps."""
    return {str(n): _measure_merging(settings, n) for n in settings.num_steps}


def make_trajectory(num_steps: int, rng: np.random.Generator) -> Trajectory:
    """Return a trajectory with growing states; parts have 0.5 to 1.5 times their mean length."""

    def draw(mean: int) -> list[int]:
        length = int(rng.integers(mean // 2, mean + mean // 2 + 1))
        tokens: list[int] = rng.integers(8, 200, size=length).tolist()  # no special tokens
        return tokens

    state, transitions = draw(PROMPT_TOKENS), []
    for number in range(num_steps):
        action = draw(ACTION_TOKENS)
        transitions.append(
            Transition(
                messages=[{"role": "user", "content": ""}], prompt_ids=state, completion_ids=action,
                logprobs=np.zeros(len(action), np.float32), action="", reward=float(rng.random()),
                reward_terms={}, terminated=number == num_steps - 1, truncated=False, info={},
            )
        )  # fmt: skip
        state = [*state, *action, *draw(OBSERVATION_TOKENS)]
    return Trajectory(
        task_id="0", group_id="0", transitions=transitions, metrics={"success": 0.0},
        timings={"generate_seconds": 0.0, "environment_seconds": 0.0},
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


def _measure_merging(settings: Settings, num_steps: int) -> dict[str, Any]:
    rng = np.random.default_rng([SEED, num_steps])
    batch = [make_trajectory(num_steps, rng) for _ in range(settings.num_trajectories)]
    with tempfile.TemporaryDirectory() as folder:
        merged = _make_trainer(settings, folder, batch, merge_steps=True)
        separate = _make_trainer(settings, folder, batch, merge_steps=False)
        sides = {"merged": StepTimer(merged).step, "rows": StepTimer(separate).step}
        steps = measure_interleaved(sides, settings.rounds, description="merged vs rows")
    seconds = {name: [gradient for _, gradient in timed] for name, timed in steps.items()}
    row_lengths = [
        [len(t.prompt_ids) + len(t.completion_ids) for t in trajectory.transitions]
        for trajectory in batch
    ]
    merged_tokens = sum(lengths[-1] for lengths in row_lengths)  # the last has all before it
    speed = merged_tokens / float(np.median(seconds["merged"]))
    return compare(seconds["merged"], seconds["rows"]) | {
        "model": settings.gradient_model,
        "merged_tokens": merged_tokens,
        "token_ratio": sum(map(sum, row_lengths)) / merged_tokens,
        "merged": utilisation(merged.model, speed),
    }


def _make_trainer(
    settings: Settings, folder: str, batch: Sequence[Trajectory], *, merge_steps: bool
) -> StepGRPOTrainer:
    config = StepGRPOConfig(
        output_dir=folder,
        max_steps=1,
        advantage_estimator="grpo_step",
        per_device_train_batch_size=len(batch),
        num_generations=len(batch),
        max_tokens_per_micro_batch=settings.token_budget,
        max_completion_length=24,
        max_logprob_drift=None,  # the tokens were not sampled
        learning_rate=1e-6,
        save_strategy="no",
        **settings.trainer_options,
    )
    model = load_model(settings.gradient_model, settings.device)
    trainer = StepGRPOTrainer(
        model=model, env=ENVIRONMENT, args=config, processing_class=load_tokenizer()
    )
    trainer.args.merge_steps = merge_steps
    trainer.rollouts.collectors["train"] = RecordedRollout(batch)
    return trainer
