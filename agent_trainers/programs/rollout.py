"""Programs and their tasks in place of an environment, and the collection of their episodes.

`ProgramRollout` runs many episodes at once, as `Rollout` does in environments. A program that
raises, hangs or dies ends its own episode, with the error recorded.
"""

import copy
import os
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent_envs.core.async_bridge import CallSession, resolve
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError, RolloutError
from agent_trainers.gateway import Gateway, Session, SessionLimits
from agent_trainers.policies.policy import Policy
from agent_trainers.programs.program import (
    Outcome,
    Program,
    ProgramSession,
    Run,
    ScoreAnswer,
    check_role,
    find_reward,
    make_runner,
    read_outcome,
)
from agent_trainers.rollout.collector import OnEnd
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tasks.sources import TaskSource
from agent_trainers.trajectory import StopReason, Trajectory

PROCESSES_PER_CORE: Final = 4
"""Programs wait for the model most of the time."""


class ProgramTasks(TaskSource):
    """A program and its tasks, in place of an environment in `StepGRPOTrainer`."""

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
            name = f" {tasks}" if isinstance(tasks, str | Path) else ""
            raise DataError(f"tasks{name}: there is no task in it. Write one row per task.")
        self.num_tasks = len(self.tasks)
        if min(max_calls, max_concurrency or 1) < 1:
            raise ConfigurationError("max_concurrency and max_calls must be positive.")
        for role in frozen_roles:
            check_role(role)
        if max_concurrency is None and runner != "thread":
            max_concurrency = PROCESSES_PER_CORE * (os.cpu_count() or 1)
        self.start_run = make_runner(runner, program, variables)
        self.score = find_reward(reward) if isinstance(reward, str) else reward
        self.max_concurrency, self.max_calls = max_concurrency, max_calls
        self.frozen_roles = frozenset(frozen_roles)
        self.ignored_parameters = tuple(ignored_parameters)

    def make_rollout(self, policy: Policy, **settings: Any) -> "ProgramRollout":
        """Return a rollout of the program with `policy`; `settings` are those of `Rollout`."""
        return ProgramRollout(self, policy, **settings)


class ProgramRollout:
    """Runs a program once per episode, as `Rollout` does in environments."""

    def __init__(
        self,
        source: ProgramTasks,
        policy: Policy,
        *,
        step_timeout: float = 300.0,
        episode_timeout: float | None = None,
        is_any_active: Callable[[bool], bool] | None = None,
    ) -> None:
        """Prepare to run; `step_timeout` is the time without a call; else see `Rollout`."""
        self.source, self.policy = source, policy
        self.step_timeout, self.is_any_active = step_timeout, is_any_active or bool
        self.limits = SessionLimits(
            max_calls=source.max_calls, timeout_seconds=episode_timeout or 2.0**31
        )

    def collect(
        self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Run the program once per spec; return all trajectories in order, failed ones too.

        `on_end` is called with each trajectory as it ends.
        """
        return _Episodes(self, specs, on_end).run()

    def share_loop(self) -> None:
        """Do nothing: each call of `collect` has its own gateway."""

    def close(self) -> None:
        """Do nothing."""


class _Episodes:
    """The episodes of one call."""

    def __init__(
        self, rollout: ProgramRollout, specs: Sequence[EpisodeSpec], on_end: OnEnd | None
    ) -> None:
        self._rollout, self._source = rollout, rollout.source
        self._specs, self._on_end = specs, on_end
        self._calls = CallSession()
        self._waiting = deque(range(len(specs)))
        self._running: dict[int, tuple[Session, Run]] = {}
        self._ended: dict[int, Trajectory] = {}

    def run(self) -> list[Trajectory]:
        """Run all episodes to their end; return their trajectories in order."""
        with Gateway(
            self._rollout.policy,
            limits=self._rollout.limits,
            ignored_parameters=self._source.ignored_parameters,
            in_thread=False,
        ) as self._gateway:
            try:
                self._gateway.generate(self._advance, self._rollout.is_any_active)
            finally:
                for _, run in self._running.values():
                    run.stop()
        return [self._ended[key] for key in range(len(self._specs))]

    def _advance(self) -> bool:
        """Start episodes and end those that are over; return whether any is left."""
        most = self._source.max_concurrency or len(self._specs)
        while self._waiting and len(self._running) < most:
            self._start(self._waiting.popleft())
        for ended in self._calls.wait(0.0):
            session, _ = self._running[ended.key]
            if ended.error is None:
                self._end(ended.key, _reward_episode(session, ended.value))
            else:
                self._end(ended.key, _fail_episode(session, ended.error))
        self._end_late_episodes()
        return len(self._ended) < len(self._specs)

    def _start(self, key: int) -> None:
        spec = self._specs[key]
        task = spec.task
        assert task is not None  # programs have no tasks of their own to draw
        seed = int(spec.rng.integers(2**63))
        session = self._gateway.open(task_id=str(task), group_id=spec.group_id, seed=seed)
        endpoint = ProgramSession(base_url=session.base_url, key=session.key, seed=seed)
        row = dict(self._source.tasks[task])
        run = self._source.start_run(endpoint, copy.deepcopy(row))  # which programs may modify
        self._running[key] = session, run
        self._calls.submit(key, lambda: self._outcome(run, row))

    def _outcome(self, run: Run, task: dict[str, Any]) -> Outcome:
        """Run the program and score its result; called in its own thread."""
        value = run.result()
        if self._source.score is not None:
            value = resolve(self._source.score(copy.deepcopy(task), value))
        return read_outcome(value)

    def _end_late_episodes(self) -> None:
        for key, (session, _) in list(self._running.items()):
            if session.idle_seconds > self._rollout.step_timeout:
                limit = self._rollout.step_timeout
                text = f"the program did not call the model for {limit:g} seconds"
            elif session.seconds_left <= 0:
                text = f"the episode took longer than {session.limits.timeout_seconds:g} seconds"
            else:
                continue
            self._end(key, session.close(stop_reason=StopReason.TIMEOUT, error=text))

    def _end(self, key: int, trajectory: Trajectory) -> None:
        frozen = self._source.frozen_roles
        steps = [
            replace(step, info={**step.info, "is_frozen": True}) if step.role in frozen else step
            for step in trajectory.transitions
        ]
        trajectory = self._ended[key] = replace(trajectory, transitions=steps)
        self._calls.abandon(key)
        self._running.pop(key)[1].stop()
        if self._on_end is not None:
            self._on_end(trajectory)


def _reward_episode(session: Session, outcome: Outcome) -> Trajectory:
    """Close the session of a program that has returned."""
    reason = StopReason.TURN_LIMIT if outcome.truncated else StopReason.ANSWERED
    if not isinstance(outcome.reward, Mapping):
        return session.close(outcome.reward, metrics=outcome.metrics, default_reason=reason)
    rewards = outcome.reward
    by_role = {f"reward/{role}": reward for role, reward in rewards.items()}
    trajectory = session.close(metrics={**outcome.metrics, **by_role}, default_reason=reason)
    steps = trajectory.transitions
    last = {step.role: place for place, step in enumerate(steps)}
    silent = sorted(rewards.keys() - last.keys())
    text = f"The roles {silent} are rewarded but never called the model; {sorted(last)} did."
    if steps and len(silent) == len(rewards):
        return _as_fault(trajectory, RolloutError(text))
    if steps and any(rewards[role] for role in silent):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    for role in rewards.keys() & last.keys():  # at the role's last step, for this role alone
        step = steps[last[role]]
        steps[last[role]] = replace(
            step,
            reward=rewards[role],
            reward_terms={"outcome": rewards[role]},
            info={**step.info, "reward_owners": {"outcome": role}},
        )
    return trajectory


def _fail_episode(session: Session, error: BaseException) -> Trajectory:
    """Close the session of a program that has failed.

    It is truncated if the model's last call failed, whose error programs raise, or its last turn
    was cut off: leaving such episodes out would make too long turns free of cost.
    """
    reason = StopReason.TOKEN_LIMIT if session.is_cut_off else StopReason.ANSWERED
    trajectory = session.close(metrics={"success": 0.0}, default_reason=reason)
    if trajectory.stop_reason in (StopReason.ANSWERED, StopReason.ENVIRONMENT_ERROR):
        return _as_fault(trajectory, error)
    return replace(trajectory, error=trajectory.error or _traceback(error))


def _as_fault(trajectory: Trajectory, error: BaseException) -> Trajectory:
    steps = [replace(step, terminated=False, truncated=False) for step in trajectory.transitions]
    return replace(
        trajectory,
        transitions=steps,
        stop_reason=StopReason.ENVIRONMENT_ERROR,
        error=_traceback(error),
        final_prompt_ids=[],
    )


def _traceback(error: BaseException) -> str:
    if isinstance(error, RolloutError):  # it names the cause, which is not in our code
        return str(error)
    return "".join(traceback.format_exception(error))
