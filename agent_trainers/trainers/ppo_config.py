"""Settings of step-level PPO: those of step-level GRPO, and the critic's."""

from dataclasses import dataclass, field

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS, needs_values
from agent_trainers.trainers.grpo_config import StepGRPOConfig


@dataclass
class StepPPOConfig(StepGRPOConfig):
    """Settings of `StepPPOTrainer`, on top of `StepGRPOConfig`."""

    advantage_estimator: str = field(
        default="gae_step",
        metadata={
            "help": "How rewards and values become advantages: one of "
            + ", ".join(name for name in ADVANTAGE_ESTIMATORS if needs_values(name))
            + "."
        },
    )
    critic_model: str | None = field(
        default=None,
        metadata={
            "help": "Name or folder of the critic's model. Default: a value head on the policy."
        },
    )
    critic_learning_rate: float | None = field(
        default=None,
        metadata={"help": "The critic's learning rate. Default: learning_rate."},
    )
    critic_warmup_steps: int = field(
        default=0,
        metadata={"help": "Optimiser steps at the beginning that train the critic alone."},
    )
    value_coef: float = field(
        default=0.5, metadata={"help": "Weight of the value loss beside the policy loss."}
    )
    value_clip_range: float = field(
        default=0.5,
        metadata={"help": "How far a value may move from where it was when the batch was played."},
    )

    bootstrap_truncated: bool = field(
        default=True,
        metadata={
            "help": "Whether the last state of an episode that was cut off keeps its value. With a "
            "tight turn limit that is a rule of the task, switch it off: never to answer would be "
            "worth as much as to answer."
        },
    )

    def __post_init__(self) -> None:
        """Check the critic's settings."""
        super().__post_init__()
        if not needs_values(self.advantage_estimator):
            raise ConfigurationError(
                f"advantage_estimator={self.advantage_estimator!r} uses no critic: use "
                "StepGRPOTrainer with StepGRPOConfig."
            )
        for option in ("value_coef", "value_clip_range"):
            if getattr(self, option) <= 0:
                raise ConfigurationError(f"{option} must be positive, not {getattr(self, option)}.")
        if self.critic_learning_rate is not None and self.critic_learning_rate <= 0:
            raise ConfigurationError(
                f"critic_learning_rate must be positive, not {self.critic_learning_rate}."
            )
        if self.critic_warmup_steps < 0:
            raise ConfigurationError(
                f"critic_warmup_steps must be 0 or more, not {self.critic_warmup_steps}."
            )
