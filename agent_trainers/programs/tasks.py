"""`ProgramTasks`: a program and the tasks that it is run on, for trainers and for evaluation."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.policies.policy import Policy, Schemas
from agent_trainers.programs.program import Program, ScoreAnswer, check_role, find_reward
from agent_trainers.programs.rollout import ProgramRollout
from agent_trainers.programs.runners import make_runner

PROCESSES_PER_CORE: Final = 4
"""Programs wait for the model most of the time."""


class ProgramTasks:
    """A program and its tasks, in place of an environment in `StepGRPOTrainer`."""

    tools: Schemas = None
    reward_terms: Mapping[str, float] | None = None
    outcome_terms: frozenset[str] = frozenset({"outcome"})

    def __init__(
        self,
        program: str | Program,
        tasks: str | Path | Sequence[Mapping[str, Any]],
        *,
        reward: str | ScoreAnswer | None = None,
        runner: str = "thread",
        variables: Sequence[str] = (),
        max_concurrency: int | None = None,
        max_calls: int = 64,
        frozen_roles: Sequence[str] = (),
        ignored_parameters: Sequence[str] = (),
    ) -> None:
        """Choose the program and its tasks.

        Args:
            program: ``"my_module:my_function"``, a command line, or a function.
            tasks: A file with one row per task (see `read_records`), or the rows.
            reward: The function that scores the program's answer: one of `REWARDS`, an import path,
                or a function; None where the program returns a reward.
            runner: One of `RUNNERS`.
            variables: Environment variables that a process gets besides the usual ones.
            max_concurrency: Programs that run at once. If not given, a whole batch in threads, and
                `PROCESSES_PER_CORE` per core otherwise.
            max_calls: Calls to the model per episode; it is truncated there.
            frozen_roles: Roles that the model acts in but is not trained on.
            ignored_parameters: Parameters of requests that are ignored; see `Gateway`.
        """
        self.tasks = read_records(tasks) if isinstance(tasks, str | Path) else [*tasks]
        if not self.tasks:
            raise DataError("tasks: there is no task in it.")
        for name, value in (("max_concurrency", max_concurrency), ("max_calls", max_calls)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}.")
        for role in frozen_roles:
            check_role(role)
        if max_concurrency is None and runner != "thread":
            max_concurrency = PROCESSES_PER_CORE * (os.cpu_count() or 1)
        self.start_run = make_runner(runner, program, variables)
        self.score = find_reward(reward) if isinstance(reward, str) else reward
        self.max_concurrency, self.max_calls = max_concurrency, max_calls
        self.frozen_roles = frozenset(frozen_roles)
        self.ignored_parameters = tuple(ignored_parameters)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.tasks)

    def make_rollout(self, policy: Policy, **settings: Any) -> ProgramRollout:
        """Return a rollout of the program with `policy`; `settings` are those of `Rollout`."""
        return ProgramRollout(self, policy, **settings)
