"""TRL's own GRPO trainer with ``environment_factory``, in the same environments as ours."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium as gym
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from agent_trainers import TINY_POLICY
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer

_SHARED: Final = (
    "output_dir", "max_steps", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "num_generations", "per_device_train_batch_size", "max_grad_norm", "use_cpu", "bf16",
    "gradient_checkpointing", "disable_dropout", "dataloader_pin_memory", "logging_steps",
    "save_strategy", "report_to", "disable_tqdm", "beta",
)  # fmt: skip
"""Settings with the same meaning in both trainers."""
MAX_COMPLETION_TOKENS: Final = 250
"""TRL limits the whole episode, including tool results."""


def make_trl_trainer(
    env_id: str,
    env_kwargs: Mapping[str, Any],
    config: StepGRPOConfig,
    tokenizer: Any,
    model: Any = str(TINY_POLICY),
) -> tuple[GRPOTrainer, Callable[[], tuple[int, float]]]:
    """Make TRL's trainer for an environment with one question, on the tasks of `config`.

    TRL must be able to read tool calls by the tokenizer's template.

    Returns:
        The trainer, and a function like `batch_of` for its last batch.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    probe = gym.make(env_id, **env_kwargs)
    num_tasks = getattr(probe.unwrapped, "num_tasks", None) or config.num_train_groups
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=environment_return,
        args=GRPOConfig(
            max_completion_length=MAX_COMPLETION_TOKENS,
            max_tool_calling_iterations=probe.spec.max_episode_steps - 1,  # type: ignore[union-attr,operator]
            **{name: getattr(config, name) for name in _SHARED},
        ),
        train_dataset=tasks_dataset(env_id, num_tasks, config.seed, **env_kwargs),
        processing_class=tokenizer,
        environment_factory=environment_factory(env_id, **env_kwargs),
    )

    def last_batch() -> tuple[int, float]:
        episodes = [env._episode for env in trainer.environments]
        success = sum(episode.info["metrics"].get("success", 0.0) for episode in episodes)
        return sum(episode.num_turns for episode in episodes), success / len(episodes)

    return trainer, last_batch


def batch_of(trainer: StepGRPOTrainer, *, are_branches_free: bool = False) -> tuple[int, float]:
    """Return environment steps and mean success of the last batch.

    The steps of branches count unless they are free. Their success does not: they start from
    advanced states.
    """
    batch = trainer.trajectories["train"]
    num_steps = sum(
        len(trajectory.transitions) - trajectory.start
        for trajectory in batch
        if not (are_branches_free and trajectory.start)
    )
    successes = [trajectory.success for trajectory in batch if not trajectory.start]
    return num_steps, sum(successes) / len(successes)
