"""Algorithms by name: each is a few settings of one of the two trainers."""

from collections.abc import Mapping
from typing import Any, Final

from agent_trainers.algorithms.advantages import needs_values
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.ppo import StepPPOTrainer
from agent_trainers.trainers.ppo_config import StepPPOConfig

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {"advantage_estimator": "grpo", "loss_denominator": "trajectory"},
    "grpo_step": {"advantage_estimator": "grpo_step"},
    "dr_grpo": {"advantage_estimator": "dr_grpo"},
    "dapo": {"advantage_estimator": "grpo", "epsilon_high": 0.28},
    "gspo": {
        "advantage_estimator": "grpo",
        "importance_sampling_level": "sequence",
        "loss_denominator": "trajectory",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce++": {"advantage_estimator": "reinforce_pp"},
    "reinforce++-baseline": {"advantage_estimator": "reinforce_pp_baseline"},
    "gigpo": {"advantage_estimator": "gigpo"},
    "vine": {"advantage_estimator": "vine"},
    "tree": {"advantage_estimator": "tree"},
    "ppo": {"advantage_estimator": "gae_token"},
    "step_ppo": {
        "advantage_estimator": "gae_step",
        "importance_sampling_level": "step",
        "loss_denominator": "step",
        "gamma": 0.99,
    },
    "turn_ppo": {
        "advantage_estimator": "gae_step",
        "importance_sampling_level": "product",
        "loss_denominator": "step",
        "gamma": 0.99,
        "lam": 0.9,
    },
    "bilevel_ppo": {"advantage_estimator": "gae_bilevel", "gamma": 0.99},
}
"""What ``--algorithm`` sets; a setting given by itself wins."""


def has_critic(algorithm: str) -> bool:
    """Return whether a preset trains a critic."""
    return needs_values(PRESETS[algorithm]["advantage_estimator"])


def config_class(algorithm: str) -> type[StepGRPOConfig]:
    """Return the class of a preset's settings."""
    return StepPPOConfig if has_critic(algorithm) else StepGRPOConfig


def trainer_class(algorithm: str) -> type[StepGRPOTrainer]:
    """Return the class of a preset's trainer."""
    return StepPPOTrainer if has_critic(algorithm) else StepGRPOTrainer
