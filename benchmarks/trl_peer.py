"""The outside reference: TRL's own GRPO with ``environment_factory``, in the same environments."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium as gym
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from agent_trainers import TINY_POLICY
from agent_trainers.trainers.episode_plan import all_tasks
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig

_SHARED: Final = (
    "output_dir", "max_steps", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "num_generations", "per_device_train_batch_size", "max_grad_norm", "use_cpu", "bf16",
    "gradient_checkpointing", "disable_dropout", "dataloader_pin_memory", "logging_steps",
    "save_strategy", "report_to", "disable_tqdm", "beta",
)  # fmt: skip
"""Settings that mean the same here and there."""
MAX_COMPLETION_TOKENS: Final = 250
"""TRL's limit is one of the whole episode, results of tools included."""


def make_trl_trainer(
    env_id: str,
    env_kwargs: Mapping[str, Any],
    config: StepGRPOConfig,
    tokenizer: Any,
    model: Any = str(TINY_POLICY),
) -> tuple[GRPOTrainer, Callable[[], tuple[int, float]]]:
    """Make TRL's trainer for an environment that asks one question.

    Settings of ours that mean the same there are taken over; the tokenizer has a template that TRL
    can read calls by.

    Returns:
        The trainer, and what says of its last batch the same as `played_by_ours`.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    probe = gym.make(env_id, **env_kwargs)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=environment_return,
        args=GRPOConfig(
            max_completion_length=MAX_COMPLETION_TOKENS,
            max_tool_calling_iterations=probe.spec.max_episode_steps - 1,  # type: ignore[union-attr,operator]
            **{name: getattr(config, name) for name in _SHARED},
        ),
        # the same tasks as ours
        train_dataset=tasks_dataset(
            env_id,
            len(all_tasks(getattr(probe.unwrapped, "num_tasks", None), config)),
            config.seed,
            **env_kwargs,
        ),
        processing_class=tokenizer,
        environment_factory=environment_factory(env_id, **env_kwargs),
    )

    def played() -> tuple[int, float]:
        environments = trainer.environments
        num_steps = sum(environment._num_steps for environment in environments)
        return num_steps, sum(e._success for e in environments) / len(environments)

    return trainer, played


def played_by_ours(trainer: StepGRPOTrainer) -> tuple[int, float]:
    """Return how many environment steps the last batch took, and what share of it succeeded.

    The steps of branches count, their success does not: they begin where others have got to.
    """
    batch = trainer.trajectories["train"]
    num_steps = sum(len(trajectory.transitions) - trajectory.start for trajectory in batch)
    if trainer.player.branches is not None:
        num_steps += trainer.player.branches.replayed_steps
    successes = [trajectory.success for trajectory in batch if not trajectory.start]
    return num_steps, sum(successes) / len(successes)
