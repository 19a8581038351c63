"""Task sources: the environments or the program that a run trains in, or evaluates in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from datasets import Dataset

from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError
from agent_envs.wrappers.awaited import awaited
from agent_trainers.policies.policy import Policy, Schemas
from agent_trainers.rollout.collector import Collector, Rollout
from agent_trainers.rollout.environments import template_tools
from agent_trainers.tasks.env_members import EnvMember, Member, name_members, read_members
from agent_trainers.tasks.samplers import TaskPool

NUM_EVAL_TASKS: Final = 200
"""Default number of evaluation tasks of an environment."""


class TaskSource:
    """Tasks by index, and the collector that runs them."""

    num_tasks: int | None
    """Number of tasks; None where they are endless."""
    names: Sequence[str] = ()
    """The names of environments, where there are several; rows have them in a column ``env``."""
    tools: Schemas = None
    """Tools that the chat template describes, if any."""
    reward_terms: Mapping[str, float] | None = None
    """The reward terms and their weights; None where they are not known in advance."""
    outcome_terms: frozenset[str] = frozenset()
    """Reward terms that are outcomes."""

    def make_rollout(self, policy: Policy, **settings: Any) -> Collector:
        """Return the collector; the settings are those of `Rollout`."""
        raise NotImplementedError


EnvLike = Member | TaskSource | Sequence[Member]


class EnvironmentTasks(TaskSource):
    """The tasks of one environment, or of several that have names, run by one `Rollout`."""

    def __init__(self, members: Sequence[EnvMember], variants: Sequence[EnvMember] = ()) -> None:
        """Make one of each environment to inspect it; `variants` are only evaluated."""
        self.members = [*members, *variants]
        self.names = [member.name for member in self.members if member.name]
        self.variants = frozenset(variant.name for variant in variants)
        self.pools: list[TaskPool] = []
        tools: list[Any] = []
        terms: list[Mapping[str, float] | None] = []
        for member in self.members:
            inspected = awaited(member.make_env())
            _, info = inspected.reset(seed=0)
            inspected.close()
            own = inspected.unwrapped
            tasks: Sequence[int] | None = member.tasks
            if (num_tasks := getattr(own, "num_tasks", None)) is not None:
                tasks = range(num_tasks) if tasks is None else tasks
                if max(tasks, default=0) >= num_tasks:
                    raise ConfigurationError(
                        f"{member.name}: task {max(tasks)} does not exist; its {num_tasks} tasks "
                        "are counted from 0."
                    )
            self.pools.append(TaskPool(env=member.name, weight=member.weight, tasks=tasks))
            tools += template_tools(info) or ()
            terms.append(getattr(own, "reward_weights", None))
            self.outcome_terms |= getattr(own, "outcome_terms", frozenset())
        self.tools = tools or None
        known = {name: weight for weights in terms for name, weight in (weights or {}).items()}
        self.reward_terms = None if None in terms else known
        sizes = [None if pool.tasks is None else len(pool.tasks) for pool in self.pools]
        self.num_tasks = None if None in sizes else sum(size or 0 for size in sizes)

    def make_rollout(self, policy: Policy, **settings: Any) -> Rollout:
        """Return a rollout of `policy` in the environments."""
        return Rollout({m.name: m.make_env for m in self.members}, policy, **settings)


def task_source(trained: EnvLike) -> TaskSource:
    """Return the task source of a trainer's argument `env`."""
    if isinstance(trained, TaskSource):
        return trained
    members = read_members(trained, "env")
    if len(members) == 1 and members[0].tasks is None:
        return EnvironmentTasks([replace(members[0], name="")])
    return EnvironmentTasks(name_members(members)[0])


def evaluation_source(
    trained: EnvLike, eval_env: EnvLike | None, eval_envs: Sequence[Member] | None
) -> TaskSource | None:
    """Return the task source of evaluations; None if it is that of training."""
    if not eval_envs and eval_env is not None:
        return task_source(eval_env)
    evaluated = trained if eval_env is None else eval_env
    if isinstance(evaluated, TaskSource) and not eval_envs:
        return None
    members = read_members(evaluated, "env")
    if not (eval_envs or any(member.eval_kwargs for member in members)):
        return None
    others = read_members(eval_envs, "eval_envs", is_weighted=False) if eval_envs else []
    named, variants = name_members(members, others)
    return EnvironmentTasks([member.in_evaluation() for member in named], variants)


def training_pools(source: TaskSource, rows: Dataset | None) -> list[TaskPool]:
    """Return the tasks that a sampler draws from; `rows` restricts those of one environment."""
    if isinstance(source, EnvironmentTasks) and source.names:
        return source.pools
    tasks = None if source.num_tasks is None else list(range(source.num_tasks))
    if rows is not None:
        tasks = list(dict.fromkeys(rows["task"]))
    return [TaskPool(env="", weight=1.0, tasks=tasks)]


def training_rows(
    source: TaskSource, given: Dataset | None, *, seed: int, num_groups: int | None, min_rows: int
) -> Dataset:
    """Return the rows that TRL's sampler goes through, one per group of `num_groups` in the run.

    At least `min_rows`, the groups of a batch, since the sampler drops incomplete batches: fewer
    tasks are repeated. Rows of a mixture only count groups: a `TaskSampler` chooses their tasks.
    """
    if given is not None:
        if source.names:
            raise ConfigurationError(
                "train_dataset holds tasks of one environment, but the run trains in several. "
                "Leave it out, and list the tasks of an environment: {id: ..., tasks: [0, 1]}."
            )
        if len(check_rows("train_dataset", given)) >= min_rows:
            return given
    if given is not None or source.num_tasks is not None:
        tasks = list(range(source.num_tasks or 0)) if given is None else given["task"]
        if not tasks:
            raise ConfigurationError("There are no tasks to train on: the data has no rows.")
        num_rows = max(len(tasks), min_rows)
        return Dataset.from_dict({"task": [tasks[i % len(tasks)] for i in range(num_rows)]})
    if num_groups is None:
        raise ConfigurationError(
            "The environment's tasks are endless: set max_steps, or pass a train_dataset with a "
            "column 'task'."
        )
    # One pass over the dataset lasts the whole run, so no task repeats.
    tasks = np.random.default_rng(seed).integers(ENDLESS, size=num_groups)
    return Dataset.from_dict({"task": tasks.tolist()})


def evaluation_rows(source: TaskSource, given: Dataset | None) -> Dataset | None:
    """Return the evaluation tasks, with their environment where there are several."""
    check_rows("eval_dataset", given)
    if not isinstance(source, EnvironmentTasks) or not source.names:
        return given
    in_domain = [name for name in source.names if name not in source.variants]
    default = {"env": in_domain[0]} if len(in_domain) == 1 else {}
    rows = [{**default, **row} for row in given or ()]
    if any(row.get("env") not in in_domain for row in rows):
        raise ConfigurationError(
            "eval_dataset needs a column 'env' with the name of the environment of each task, one "
            f"of {', '.join(in_domain)}."
        )
    for member, pool in zip(source.members, source.pools, strict=True):
        if member.name in source.variants:
            tasks = range(NUM_EVAL_TASKS) if pool.tasks is None else pool.tasks
            count = NUM_EVAL_TASKS if member.tasks is None else None
            rows += [{"env": member.name, "task": task} for task in tasks[:count]]
    return Dataset.from_list(rows) if rows else None


def check_rows(name: str, dataset: Any) -> Any:
    """Return a dataset, or None; raise ConfigurationError if it has no column ``task``."""
    if dataset is not None and "task" not in dataset.column_names:
        raise ConfigurationError(
            f"{name} needs a column 'task' with the index of a task of the environment (found: "
            f"{', '.join(dataset.column_names)})."
        )
    return dataset
