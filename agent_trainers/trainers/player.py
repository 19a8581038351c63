"""Playing the episodes of a batch, in training and in evaluation."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec, TextEnv
from agent_trainers.trainers.distributed import ProcessGroup
from agent_trainers.trainers.episode_plan import plan_episodes
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]


class EpisodePlayer:
    """Plays this process's episodes."""

    def __init__(
        self,
        args: StepGRPOConfig,
        processes: ProcessGroup,
        policy: Policy,
        make_env: MakeEnv,
        make_eval_env: MakeEnv | None,
        group_sizes: Mapping[str, int],
        *,
        is_collective: bool,
    ) -> None:
        """Prepare to play.

        Args:
            args: Settings.
            processes: All processes.
            policy: Who acts.
            make_env: Makes an environment.
            make_eval_env: Makes one to evaluate in; None if it is the same.
            group_sizes: Episodes of a group, by mode.
            is_collective: Whether all processes generate together.
        """
        self._args, self._processes, self._group_sizes = args, processes, group_sizes

        def rollout(make_env: MakeEnv) -> Rollout:
            return Rollout(
                make_env,
                policy,
                step_timeout=args.step_timeout,
                episode_timeout=args.episode_timeout,
                group_quorum=args.group_quorum,
                is_any_active=processes.any if is_collective else None,
            )

        self.rollouts = {"train": rollout(make_env)}
        self.rollouts["eval"] = rollout(make_eval_env) if make_eval_env else self.rollouts["train"]

    def play(
        self, inputs: Sequence[Mapping[str, Any]], mode: str, step: tuple[int, int]
    ) -> list[Trajectory]:
        """Play one episode per row of the dataset; see `plan_episodes`."""
        return self.rollouts[mode].collect(self.specs(inputs, mode, step))

    def specs(
        self, inputs: Sequence[Mapping[str, Any]], mode: str, step: tuple[int, int]
    ) -> list[EpisodeSpec]:
        """Return what to play; collective."""
        return plan_episodes(
            inputs,
            mode=mode,
            first=self._processes.num_before(len(inputs)),
            group_size=self._group_sizes[mode],
            seed=self._args.seed,
            step=step,
        )


def env_maker(env: str | MakeEnv) -> MakeEnv:
    """Return what makes the environment of a Gymnasium id, or `env` itself if it is that."""
    return functools.partial(gym.make, env) if isinstance(env, str) else env


def check_schedules(args: StepGRPOConfig, env: TextEnv) -> None:
    """Make sure that scheduled reward terms are terms of the environment.

    Raises:
        UnknownNameError: If one is not.
    """
    weights = getattr(env.unwrapped, "reward_weights", None)
    if weights is not None:
        for name in args.schedules:
            lookup(weights, name, kind="scheduled reward term")


def environment_reward(**_: Any) -> list[float]:
    """Stand in the place where TRL wants a reward function; the environment owns the reward.

    Raises:
        RuntimeError: Always. TRL must not call it: `_generate_and_score_completions` is overridden.
    """
    raise RuntimeError("TRL asked for a reward although the environment gives it.")
