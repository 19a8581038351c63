"""The tasks of several environments: what a trainer plays of them, and what it is measured on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from datasets import Dataset

from agent_envs.errors import ConfigurationError
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.rendering import Schemas
from agent_trainers.rollout.collector import Rollout
from agent_trainers.tasks.curriculum import Curriculum, curriculum_draws
from agent_trainers.tasks.env_members import EnvMember, Member, name_members, read_members
from agent_trainers.tasks.task_draws import TaskDraws, TaskPool
from agent_trainers.trainers.episode_plan import (
    EnvironmentTasks,
    MakeEnv,
    TaskSource,
    all_tasks,
    check_tasks,
)
from agent_trainers.trainers.grpo_config import StepGRPOConfig

NUM_EVAL_TASKS: Final = 200
"""Tasks of an environment that are played to measure it, where nothing else is said."""

Played = str | MakeEnv | TaskSource | Sequence[Member]


class EnvMixture:
    """Several environments, played together by one `Rollout`; see `TaskSource`."""

    def __init__(self, members: Sequence[EnvMember], variants: Sequence[EnvMember] = ()) -> None:
        """Play environments that have names; `variants` are those that nothing is trained in.

        Raises:
            ConfigurationError: If tasks are named that there are not.
        """
        self.members = [*members, *variants]
        self.names = [member.name for member in self.members]
        self.variants = frozenset(variant.name for variant in variants)
        self._sources = {member.name: EnvironmentTasks(member.make_env) for member in self.members}
        for member in self.members:
            num_tasks = self._sources[member.name].num_tasks
            if num_tasks is not None and max(member.tasks or [0]) >= num_tasks:
                raise ConfigurationError(
                    f"{member.name}: there is no task {max(member.tasks or [0])}; its {num_tasks} "
                    "tasks are counted from 0."
                )

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are in all; None where some are endless."""
        pools = [self.tasks_of(name) for name in self.names]
        return sum(len(tasks or ()) for tasks in pools) if None not in pools else None

    @property
    def tools(self) -> Schemas:
        """What the chat template has to describe, of all; None where the states do."""
        return [tool for source in self._sources.values() for tool in source.tools or ()] or None

    @property
    def reward_terms(self) -> Mapping[str, float] | None:
        """The reward terms of all and their weights; None where one does not say."""
        terms = [source.reward_terms for source in self._sources.values()]
        if any(term is None for term in terms):
            return None
        return {name: weight for own in terms for name, weight in (own or {}).items()}

    @property
    def outcome_terms(self) -> frozenset[str]:
        """Reward terms that are outcomes in one of them."""
        return frozenset().union(*(source.outcome_terms for source in self._sources.values()))

    def tasks_of(self, name: str) -> Sequence[int] | None:
        """Return the indices of an environment's tasks; None where they are endless."""
        given = next(member.tasks for member in self.members if member.name == name)
        num_tasks = self._sources[name].num_tasks
        return range(num_tasks) if given is None and num_tasks is not None else given

    @property
    def pools(self) -> list[TaskPool]:
        """What is drawn from in training."""
        return [
            TaskPool(env=member.name, weight=member.weight, tasks=self.tasks_of(member.name))
            for member in self.members
        ]

    def make_rollout(self, policy: Policy, **settings: Any) -> Rollout:
        """Return what plays `policy` in the environments."""
        makers: dict[str, Callable[[], Any]] = {m.name: m.make_env for m in self.members}
        return Rollout(makers, policy, **settings)


def task_source(played: Played) -> TaskSource:
    """Return what is played: `played` itself if it is that, else the tasks of environments.

    Raises:
        ConfigurationError: If `played` is none of them, or a list with a wrong entry.
    """
    if isinstance(played, TaskSource):
        return played
    if isinstance(played, str) or not isinstance(played, Sequence):
        return EnvironmentTasks(played)
    members = read_members(played, "env")
    if len(members) == 1 and members[0].tasks is None:  # as if it were given by itself
        return EnvironmentTasks(members[0].make_env)
    return EnvMixture(name_members(members)[0])


def measured_source(
    played: Played, eval_env: Played | None, eval_envs: Sequence[Member] | None
) -> TaskSource | None:
    """Return where a run is measured; None where that is just where it is trained.

    Args:
        played: What is trained in.
        eval_env: Where that is measured, if it differs.
        eval_envs: Environments that are measured, too, and never trained in.

    Raises:
        ConfigurationError: If there is something wrong with an entry, or with what they stand
            beside.
    """
    if not eval_envs and eval_env is not None:
        return task_source(eval_env)
    members = _members(played if eval_env is None else eval_env, bool(eval_envs))
    if members is None or not (eval_envs or any(member.eval_kwargs for member in members)):
        return None
    others = read_members(eval_envs, "eval_envs", is_weighted=False) if eval_envs else []
    named, variants = name_members(members, others)
    in_domain = [
        replace(m, kwargs={**m.kwargs, **m.eval_kwargs}, eval_kwargs={}, tasks=None) for m in named
    ]
    return EnvMixture(in_domain, variants)


def _members(played: Played, is_needed: bool) -> list[EnvMember] | None:
    """Return the environments that are played; None where they are no list and none is needed."""
    if isinstance(played, EnvMixture):
        return played.members
    if isinstance(played, TaskSource):
        if is_needed:
            raise ConfigurationError(
                "eval_envs are environments, and what is trained is a program. Give its "
                "evaluation tasks instead (eval_tasks)."
            )
        return None
    if isinstance(played, str) or not isinstance(played, Sequence):
        return read_members([played], "env") if is_needed else None
    return read_members(played, "env")


def with_levels(
    played: Played, rows: Dataset | None, curriculum: Curriculum | None
) -> tuple[Played, Dataset | None]:
    """Return an environment as its levels, if a curriculum gives it arguments, and its rows.

    Raises:
        ConfigurationError: If there is no environment, or more than one, to give them to.
    """
    levels = [] if curriculum is None else curriculum.levels
    if not levels:
        return played, rows
    members = [] if isinstance(played, TaskSource) else _members(played, is_needed=True)
    if not members or len(members) > 1:
        raise ConfigurationError(
            "curriculum: arguments are those of one environment, and there is "
            f"{'none' if not members else 'more than one'}. Leave them out: the environments of "
            "the run are its levels, in their order."
        )
    tasks = members[0].tasks
    if rows is not None:
        tasks = list(dict.fromkeys(check_tasks("train_dataset", rows)["task"]))
    made = [
        replace(members[0], kwargs={**members[0].kwargs, **level}, tasks=tasks, name="")
        for level in levels
    ]
    return made, None


def training_draws(
    source: TaskSource, given: Dataset | None, args: StepGRPOConfig
) -> TaskDraws | None:
    """Return what says which task comes next; None where the rows of the dataset do.

    Raises:
        ConfigurationError: If a curriculum has nothing to choose from.
    """
    curriculum = args.parsed_curriculum
    if isinstance(source, EnvMixture):
        pools = source.pools
    elif curriculum is None and not args.max_extra_groups:
        return None
    else:
        num_tasks = source.num_tasks
        tasks = None if num_tasks is None else list(range(num_tasks))
        if given is not None:
            tasks = list(dict.fromkeys(given["task"]))
        pools = [TaskPool(env="", weight=1.0, tasks=tasks)]
    if curriculum is None:
        return TaskDraws(pools, args.seed)
    return curriculum_draws(curriculum, pools, args.seed)


def training_rows(source: TaskSource, given: Dataset | None, args: StepGRPOConfig) -> Dataset:
    """Return the rows that TRL's sampler goes through.

    Of a mixture they only count groups: `TaskDraws` says what is played.

    Raises:
        ConfigurationError: If there are tasks of no environment among them.
    """
    if not isinstance(source, EnvMixture):
        return check_tasks("train_dataset", given or all_tasks(source.num_tasks, args))
    if given is not None:
        raise ConfigurationError(
            "train_dataset names tasks of one environment, and several are trained in. Leave it "
            "out, and give those whose tasks are not all to be played: {id: ..., tasks: [0, 1]}."
        )
    per_batch = args.generation_batch_size // args.num_generations
    rows = all_tasks(source.num_tasks, args)
    # TRL's sampler leaves out what does not fill a batch
    return rows if len(rows) >= per_batch else Dataset.from_dict({"task": list(range(per_batch))})


def measured_rows(source: TaskSource, given: Dataset | None) -> Dataset | None:
    """Return the tasks that are played to measure a run, of each environment; None for none.

    Raises:
        ConfigurationError: If it is not clear of which environment a task is.
    """
    check_tasks("eval_dataset", given)
    if not isinstance(source, EnvMixture):
        return given
    in_domain = [name for name in source.names if name not in source.variants]
    rows = [] if given is None else [{"env": in_domain[0], **row} for row in given]
    if given is not None and len(in_domain) > 1 and "env" not in given.column_names:
        raise ConfigurationError(
            "eval_dataset needs a column 'env' with the name of the environment of each task, one "
            f"of {', '.join(in_domain)}."
        )
    if unknown := sorted({row["env"] for row in rows} - set(in_domain)):
        raise ConfigurationError(
            f"eval_dataset: there is no environment {unknown[0]!r} that is trained in. There are "
            f"{', '.join(in_domain)}."
        )
    for member in source.members:
        if member.name in source.variants:
            tasks = source.tasks_of(member.name)
            first = range(NUM_EVAL_TASKS) if tasks is None else tasks[:NUM_EVAL_TASKS]
            chosen = first if member.tasks is None else member.tasks
            rows += [{"env": member.name, "task": task} for task in chosen]
    return Dataset.from_list(rows) if rows else None
