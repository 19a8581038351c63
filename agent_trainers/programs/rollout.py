"""Collect many episodes of a program at once against one policy, as `Rollout` does of environments.

Each episode has a session at the gateway, which makes a trajectory of its calls. A program that
raises, hangs or dies ends its own episode, with the error recorded, and the others go on.
"""

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_envs.core.async_bridge import CallSession, resolve
from agent_envs.core.async_bridge import Outcome as CallOutcome
from agent_trainers.gateway import Gateway, Session, SessionLimits
from agent_trainers.policies.policy import Policy
from agent_trainers.programs.endings import failed, frozen, rewarded
from agent_trainers.programs.program import Outcome, ProgramSession, ScoreAnswer, read_outcome
from agent_trainers.programs.runners import Run
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

StartRun = Callable[[ProgramSession, dict[str, Any]], Run]


class ProgramRollout:
    """Plays episodes by running a program for each; see `agent_trainers.rollout.collector`."""

    def __init__(
        self,
        start_run: StartRun,
        tasks: Sequence[Mapping[str, Any]],
        policy: Policy,
        *,
        score: ScoreAnswer | None = None,
        max_concurrency: int | None = None,
        max_calls: int = 64,
        frozen_roles: Collection[str] = (),
        ignored_parameters: Collection[str] = (),
        step_timeout: float = 300.0,
        episode_timeout: float | None = None,
        group_quorum: float = 1.0,
        is_any_active: Callable[[bool], bool] | None = None,
    ) -> None:
        """Play `policy` in programs.

        Args:
            start_run: Prepares an episode, given its session and task.
            tasks: What `EpisodeSpec.task` counts.
            policy: Who acts.
            score: Makes a reward of a task and what the program returned; None where the program
                returns a reward.
            max_concurrency: Programs that run at once; None for all of a call.
            max_calls: Calls to the model that an episode may make.
            frozen_roles: Roles that nothing is learned from.
            ignored_parameters: As in `Gateway`.
            step_timeout: Seconds that a program may go without asking the model.
            episode_timeout: Seconds that an episode may take; None for no limit.
            group_quorum: As in `Rollout`.
            is_any_active: As in `Rollout`.
        """
        self.start_run, self.tasks, self.policy, self.score = start_run, tasks, policy, score
        self.max_concurrency = max_concurrency or 2**31
        self.frozen_roles = frozenset(frozen_roles)
        self.ignored_parameters = ignored_parameters
        self.step_timeout, self.episode_timeout = step_timeout, episode_timeout
        self.group_quorum, self.is_any_active = group_quorum, is_any_active
        self.limits = SessionLimits(max_calls=max_calls, timeout_seconds=episode_timeout or 2.0**31)

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Run the program once per spec; return the trajectories in order, also those that failed.

        `on_end` is told of each as it ends, in no particular order.
        """
        with Gateway(
            self.policy,
            limits=self.limits,
            ignored_parameters=self.ignored_parameters,
            in_thread=False,
        ) as gateway:
            collection = _Collection(self, gateway, specs, on_end)
            try:
                gateway.generate(collection.advance, self.is_any_active or bool)
            finally:
                collection.stop()
        return collection.trajectories()

    def close(self) -> None:
        """Do nothing: nothing is kept."""


@dataclass(slots=True)
class _Episode:
    """An episode under way."""

    session: Session
    run: Run | None
    """None where it was never begun."""


class _Collection:
    """The episodes of one call of `collect`."""

    def __init__(
        self,
        rollout: ProgramRollout,
        gateway: Gateway,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None,
    ) -> None:
        self._rollout, self._gateway, self._specs, self._on_end = rollout, gateway, specs, on_end
        self._calls = CallSession()
        self._waiting = deque(range(len(specs)))
        self._running: dict[int, _Episode] = {}
        self._ended: dict[int, Trajectory] = {}
        sizes = Counter(spec.group_id for spec in specs)
        # How many episodes of each group still have to end well
        self._missing = {g: math.ceil(n * rollout.group_quorum) for g, n in sizes.items()}

    def advance(self) -> bool:
        """Begin episodes and end those that are over; return whether any is left."""
        while self._waiting and len(self._running) < self._rollout.max_concurrency:
            self._begin(self._waiting.popleft())
        for outcome in self._calls.wait(0.0):
            self._note(outcome)
        self._close_late_ones()
        return len(self._ended) < len(self._specs)

    def stop(self) -> None:
        """End what still runs."""
        for episode in self._running.values():
            if episode.run is not None:
                episode.run.stop()

    def trajectories(self) -> list[Trajectory]:
        """Return what was played, in order."""
        return [self._ended[key] for key in range(len(self._specs))]

    def _begin(self, key: int) -> None:
        spec = self._specs[key]
        task = spec.task
        assert task is not None  # programs have no tasks of their own to draw
        seed = int(spec.rng.integers(2**63))
        session = self._gateway.open(task_id=str(task), group_id=spec.group_id, seed=seed)
        known = ProgramSession(base_url=session.base_url, key=session.key, seed=seed)
        run = self._rollout.start_run(known, self._row(task))
        self._running[key] = _Episode(session, run)
        self._calls.submit(key, lambda: self._outcome(run, task))

    def _row(self, task: int) -> dict[str, Any]:
        """Return a task, for whoever may change what it is given."""
        return copy.deepcopy(dict(self._rollout.tasks[task]))

    def _outcome(self, run: Run, task: int) -> Outcome:
        """Run the program and score what it returns; in a thread of its own."""
        value = run.result()
        if self._rollout.score is not None:
            value = resolve(self._rollout.score(self._row(task), value))
        return read_outcome(value)

    def _note(self, ended: CallOutcome) -> None:
        session = self._running[ended.key].session
        if ended.error is None:
            trajectory = rewarded(session, ended.value)
        else:
            trajectory = failed(session, ended.error)
        self._end(ended.key, trajectory)

    def _close_late_ones(self) -> None:
        """End the episodes that took too long, and the rest once every group has its quorum."""
        rollout = self._rollout
        for key, episode in list(self._running.items()):
            session = episode.session
            if session.idle_seconds > rollout.step_timeout:
                text = f"the program did not ask the model for {rollout.step_timeout:g} seconds"
            elif session.seconds_left <= 0:
                text = f"the episode took longer than {rollout.episode_timeout:g} seconds"
            else:
                continue
            self._end(key, session.close(stop_reason=StopReason.TIMEOUT, error=text))
        if any(missing > 0 for missing in self._missing.values()):
            return
        text = "the other groups had their quorum"
        while self._waiting:
            key = self._waiting.popleft()
            spec = self._specs[key]
            session = self._gateway.open(task_id=str(spec.task), group_id=spec.group_id)
            self._running[key] = _Episode(session, None)
        for key, episode in list(self._running.items()):
            self._end(key, episode.session.close(stop_reason=StopReason.LEFT_OUT, error=text))

    def _end(self, key: int, trajectory: Trajectory) -> None:
        trajectory = frozen(trajectory, self._rollout.frozen_roles)
        episode = self._running.pop(key)
        self._calls.abandon(key)
        if episode.run is not None:
            episode.run.stop()
        self._ended[key] = trajectory
        self._missing[trajectory.group_id] -= trajectory.is_scorable
        if self._on_end is not None:
            self._on_end(trajectory)
