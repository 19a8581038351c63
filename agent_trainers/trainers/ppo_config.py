"""Settings of step-level PPO: those of step-level GRPO, and the critic's."""

from dataclasses import dataclass
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS, needs_values
from agent_trainers.trainers.grpo_config import Ranges, StepGRPOConfig, check_ranges

_RANGES: Final[Ranges] = {
    "positive": (lambda x: x > 0, ("value_coef", "value_clip_range", "critic_learning_rate")),
    "0 or more": (lambda x: x >= 0, ("critic_warmup_steps",)),
}


@dataclass
class StepPPOConfig(StepGRPOConfig):
    """Settings of `StepPPOTrainer`, on top of `StepGRPOConfig`."""

    advantage_estimator: str = HfArg(
        default="gae_step",
        help="How rewards and values become advantages: one of "
        + ", ".join(name for name in ADVANTAGE_ESTIMATORS if needs_values(name))
        + ".",
    )
    critic_model: str | None = HfArg(
        default=None,
        help="Name or folder of the critic's model; a folder that holds a critic, of "
        "a trained value or of a run with one, begins with that. Default: a value head on the "
        "policy.",
    )
    critic_learning_rate: float | None = HfArg(
        default=None,
        help="The critic's learning rate. Default: ten times learning_rate, as published (1e-5 "
        "beside 1e-6).",
    )
    critic_warmup_steps: int = HfArg(
        default=0, help="Optimiser steps at the beginning that train the critic alone."
    )
    value_coef: float = HfArg(default=0.5, help="Weight of the value loss beside the policy loss.")
    value_clip_range: float = HfArg(
        default=0.5, help="How far a value may move from where it was when the batch was played."
    )

    bootstrap_truncated: bool = HfArg(
        default=True,
        help="Whether the last state of an episode that was cut off keeps its value. With a tight "
        "turn limit that is a rule of the task, switch it off: never to answer would be worth as "
        "much as to answer.",
    )

    def __post_init__(self) -> None:
        """Check the critic's settings."""
        super().__post_init__()
        if not needs_values(self.advantage_estimator):
            raise ConfigurationError(
                f"advantage_estimator={self.advantage_estimator!r} uses no critic: use "
                "StepGRPOTrainer with StepGRPOConfig."
            )
        check_ranges(self, _RANGES)
