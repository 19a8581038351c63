"""What is played when: tasks of a run, the episodes of a batch with their seeds, and who plays."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from datasets import Dataset

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError
from agent_trainers.experimental.branching.branch_player import BranchPlayer
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.rendering import Schemas
from agent_trainers.rollout.collector import Collector, Rollout
from agent_trainers.rollout.episode import EpisodeSpec, TextEnv, template_tools
from agent_trainers.tasks.task_draws import TaskDraws
from agent_trainers.trainers.distributed import ProcessGroup
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]


@runtime_checkable
class TaskSource(Protocol):
    """What is played: tasks by number, and who plays them."""

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None where they are endless."""

    @property
    def tools(self) -> Schemas:
        """What the chat template has to describe; None where it has nothing to."""

    @property
    def reward_terms(self) -> Mapping[str, float] | None:
        """The reward terms and their weights; None where they are not known before they come."""

    @property
    def outcome_terms(self) -> frozenset[str]:
        """Reward terms that are outcomes."""

    def make_rollout(
        self,
        policy: Policy,
        *,
        step_timeout: float,
        episode_timeout: float | None,
        group_quorum: float,
        is_any_active: Callable[[bool], bool] | None,
    ) -> Collector:
        """Return who plays; the settings are those of `Rollout`."""


class EnvironmentTasks:
    """The tasks of an environment, played by `Rollout`; see `TaskSource`."""

    def __init__(self, env: str | MakeEnv) -> None:
        """Play `env`, a Gymnasium id or a function that makes one; one is made to be asked."""
        self._make_env = env_maker(env)
        asked = self._make_env()
        _, info = asked.reset(seed=0)
        asked.close()
        self.num_tasks: int | None = getattr(asked.unwrapped, "num_tasks", None)
        self.tools = template_tools(info)
        self.reward_terms: Mapping[str, float] | None
        self.reward_terms = getattr(asked.unwrapped, "reward_weights", None)
        self.outcome_terms = getattr(asked.unwrapped, "outcome_terms", frozenset[str]())

    def make_rollout(self, policy: Policy, **settings: Any) -> Rollout:
        """Return what plays `policy` in the environment."""
        return Rollout(self._make_env, policy, **settings)


class EpisodePlayer:
    """Plays this process's episodes."""

    def __init__(
        self,
        args: StepGRPOConfig,
        processes: ProcessGroup,
        group_sizes: Mapping[str, int],
        rollouts: Mapping[str, Collector],
        *,
        draws: TaskDraws | None = None,
        env_names: Sequence[str] = (),
    ) -> None:
        """Play groups of the given sizes in the given rollouts, both by mode.

        With `draws` they say which tasks are trained on, instead of the rows of the dataset.
        `env_names` are the names of all environments, where rows name them.
        """
        self._args, self._processes, self._group_sizes = args, processes, group_sizes
        self.rollouts = dict(rollouts)
        self.draws, self._env_names = draws, list(env_names)
        self.branches: BranchPlayer | None = None
        if args.branch_steps > 0:
            self.branches = BranchPlayer(args, processes, rollouts["train"])

    @property
    def group_size(self) -> int:
        """Episodes of a group in training."""
        return self._group_sizes["train"]

    def play(
        self,
        inputs: Sequence[Mapping[str, Any]],
        mode: str,
        step: tuple[int, int],
        reward_factors: Mapping[str, float] | None = None,
    ) -> list[Trajectory]:
        """Play one episode per row of the dataset; see `plan_episodes`.

        In training by an estimator that looks at branches, each is followed by its branches, which
        begin where returns vary; `reward_factors` are what reward terms are multiplied with now.
        """
        return self.play_specs(self.specs(inputs, mode, step), mode, step, reward_factors)

    def play_specs(
        self,
        specs: Sequence[EpisodeSpec],
        mode: str,
        step: tuple[int, int],
        reward_factors: Mapping[str, float] | None = None,
    ) -> list[Trajectory]:
        """Play an episode for each spec, as `play` does."""
        if mode == "train" and self.branches is not None:
            return self.branches.play(specs, step, reward_factors)
        return self.rollouts[mode].collect(specs)

    def close(self) -> None:
        """Close the environments that wait for the next episodes."""
        for rollout in self.rollouts.values():
            rollout.close()

    def specs(
        self, inputs: Sequence[Mapping[str, Any]], mode: str, step: tuple[int, int]
    ) -> list[EpisodeSpec]:
        """Return what to play; collective."""
        counts = self._processes.all_gather(len(inputs))
        first, group_size = sum(counts[: self._processes.index]), self._group_sizes[mode]
        if mode == "train" and self.draws is not None:
            drawn = self.draws.draw(-(-sum(counts) // group_size))
            own = [drawn[i // group_size] for i in range(first, first + len(inputs))]
            inputs = [{"env": each.env, "task": each.task} for each in own]
        return self.plan(inputs, mode, step, first)

    def plan(
        self, rows: Sequence[Mapping[str, Any]], mode: str, step: tuple[int, int], first: int
    ) -> list[EpisodeSpec]:
        """Return what `plan_episodes` says of rows."""
        return plan_episodes(
            rows,
            mode=mode,
            first=first,
            group_size=self._group_sizes[mode],
            seed=self._args.seed,
            step=step,
            env_names=self._env_names,
        )


def plan_episodes(
    rows: Sequence[Mapping[str, Any]],
    *,
    mode: str,
    first: int,
    group_size: int,
    seed: int,
    step: tuple[int, int],
    env_names: Sequence[str] = (),
) -> list[EpisodeSpec]:
    """Say what to play: one group per run of `group_size` episodes over all processes.

    Seeds depend on the place in the run, not on the process, so any number of processes plays the
    same episodes, and a resumed run those that it would have played.

    Args:
        rows: This process's rows of the dataset, one per episode: ``task``, and the name ``env``
            where several environments are played.
        mode: ``"train"`` or ``"eval"``.
        first: How many episodes the processes before this one play.
        group_size: Episodes of a group.
        seed: The seed of the run.
        step: Optimiser step, and micro-batch in it.
        env_names: The names of all environments, where there are several.
    """
    is_training = mode == "train"
    place = step if is_training else (0, 0)
    specs = []
    for i, row in enumerate(rows, start=first):
        task, env = int(row["task"]), row.get("env", "")
        group, member = divmod(i, group_size)
        # In training a task may come twice in a batch; in evaluation every task is new.
        number = group if is_training else task
        # The first environment plays as it would alone.
        others = (place_of,) if env and (place_of := env_names.index(env)) else ()
        group_id = (
            f"{mode}-{place[0]}-{place[1]}-{number}-{env}"
            if env
            else (f"{mode}-{place[0]}-{place[1]}-{group}")
        )
        specs.append(
            EpisodeSpec(
                task=task,
                seed=_seed(seed, is_training, *place, task, *others),
                group_id=group_id,
                rng=np.random.default_rng([seed, is_training, *place, number, member, *others]),
                env=env,
            )
        )
    return specs


def all_tasks(num_tasks: int | None, args: StepGRPOConfig) -> Dataset:
    """Return a row per task; of an endless family, as many as ``max_steps`` needs."""
    if num_tasks is not None:
        return Dataset.from_dict({"task": list(range(num_tasks))})
    if args.max_steps <= 0:
        raise ConfigurationError(
            "The environment's tasks are endless: set max_steps, or pass a train_dataset with a "
            "column 'task'."
        )
    # One pass over the dataset lasts the whole run, so no task is seen twice.
    micro_steps = args.max_steps * args.gradient_accumulation_steps
    num_batches = -(-micro_steps // (args.steps_per_generation * args.num_iterations))
    num_needed = num_batches * args.generation_batch_size // args.num_generations
    tasks = np.random.default_rng(args.seed).integers(ENDLESS, size=num_needed)
    return Dataset.from_dict({"task": tasks.tolist()})


def check_tasks(name: str, dataset: Any) -> Any:
    """Return a dataset, or None, if it has a column `task`.

    Raises:
        ConfigurationError: If it has not; names the dataset and what was found.
    """
    if dataset is not None and "task" not in dataset.column_names:
        raise ConfigurationError(
            f"{name} needs a column 'task' with the index of a task of the environment (found: "
            f"{', '.join(dataset.column_names)}). Example: "
            "Dataset.from_dict({'task': list(range(100))})."
        )
    return dataset


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def env_maker(env: str | MakeEnv) -> MakeEnv:
    """Return what makes the environment of a Gymnasium id, or `env` itself if it is that.

    Raises:
        ConfigurationError: If it is neither.
    """
    if not isinstance(env, str) and not callable(env):
        raise ConfigurationError(
            "env is an environment, but each episode of a batch needs one of its own: pass its id, "
            "or a function that makes it, such as lambda: gym.make(...)."
        )
    return functools.partial(gym.make, env) if isinstance(env, str) else env


def check_schedules(args: StepGRPOConfig, source: TaskSource) -> None:
    """Make sure that scheduled reward terms are terms of what is played.

    Raises:
        UnknownNameError: If one is not.
    """
    if source.reward_terms is not None:
        for name in args.schedules:
            lookup(source.reward_terms, name, kind="scheduled reward term")


def environment_reward(**_: Any) -> list[float]:
    """Stand in the place where TRL wants a reward function; the environment owns the reward.

    Raises:
        RuntimeError: Always. TRL must not call it: `_generate_and_score_completions` is overridden.
    """
    raise RuntimeError("TRL asked for a reward although the environment gives it.")
