"""Diagnosis by the oracle: from which states of a failed episode can the task still be solved?"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from agent_envs.core.async_bridge import call_with_deadline, resolve
from agent_envs.core.replay import replay
from agent_envs.errors import ConfigurationError, ReplayError
from agent_trainers.experimental.diagnose.diagnosis import (
    Diagnoses,
    Diagnosis,
    StateChance,
    conclude,
    give_up,
)
from agent_trainers.rollout.environments import TextEnv, is_immediate
from agent_trainers.trajectory import Trajectory

MAX_PLANS: Final = 32
"""Plans tried at a state, those closest to the progress so far first."""
STEP_TIMEOUT: Final = 300.0
"""Seconds that a reset or a step may take."""


def diagnose_by_oracle(
    make_env: Callable[[], TextEnv], trajectories: Sequence[Trajectory]
) -> Diagnoses:
    """Try the task's reference actions from every state of failed episodes.

    At a state the oracle asks for ``reference_actions()`` and tries every suffix of them. A state
    from which one succeeds, and all states before it, have chance 1, the others 0. An episode in
    which the environment raises, hangs or differs from the recording is not diagnosed; its note
    gives the reason.

    Args:
        make_env: Makes an environment with the arguments of the episodes.
        trajectories: Failed episodes with `Trajectory.seed`; see `find_start`.

    Raises:
        ConfigurationError: If the environment has no ``reference_actions()``.
        ReplayError: If no episode can be replayed.
    """
    oracle = _Oracle(make_env)
    errors: list[Exception] = []
    diagnoses: list[Diagnosis] = []
    try:
        for trajectory in trajectories:
            try:
                diagnoses.append(oracle.diagnose(trajectory))
            except ConfigurationError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, noted
                oracle.discard()
                diagnoses.append(give_up(trajectory, f"{type(error).__name__}: {error}"))
                if isinstance(error, ReplayError):
                    errors.append(error)
    finally:
        oracle.discard()
    if errors and len(errors) == len(trajectories):
        raise errors[0]
    return Diagnoses(episodes=diagnoses, environment_steps=oracle.num_steps)


class _Oracle:
    """Environment in which plans are tried."""

    def __init__(self, make_env: Callable[[], TextEnv]) -> None:
        self._make_env = make_env
        self._env: TextEnv | None = None
        self.num_steps = 0

    def discard(self) -> None:
        """Close the environment, which may be in any state."""
        if self._env is not None:
            env, self._env = self._env, None
            env.close()

    def diagnose(self, trajectory: Trajectory) -> Diagnosis:
        """Find the last state from which the task can be solved."""
        recorded = [transition.action for transition in trajectory.transitions]
        last, solution = -1, tuple[str, ...]()
        for t in reversed(range(len(recorded))):
            if (found := self._solve(trajectory, t)) is not None:
                last, solution = t, found
                break
        states = []
        for t in range(len(recorded)):
            chance = float(t <= last)
            actions = (*recorded[t:last], *solution) if t <= last else ()
            states.append(StateChance(1, int(chance), chance, chance, chance, actions))
        return conclude(trajectory, states)

    def _solve(self, trajectory: Trajectory, t: int) -> tuple[str, ...] | None:
        """Return actions that solve the task from the state before step `t`; None if none do."""
        failure: BaseException | None = None
        for plan in self._run(lambda env: self._plans(env, trajectory, t), t):
            try:
                if self._run(lambda env: self._succeeds(env, trajectory, t, plan), t + len(plan)):  # noqa: B023
                    return plan  # type: ignore[no-any-return]
            except (Exception, SystemExit) as error:  # noqa: BLE001 - another plan may succeed
                failure = error
                self.discard()
        if failure is not None:
            raise failure
        return None

    def _run(self, function: Callable[[TextEnv], Any], num_steps: int) -> Any:
        env = self._env = self._env or self._make_env()
        seconds = None if is_immediate(env) else STEP_TIMEOUT * (1 + num_steps)
        return call_with_deadline(lambda: function(env), seconds)

    def _reach(self, env: TextEnv, trajectory: Trajectory, t: int) -> None:
        recorded = trajectory.transitions
        steps = replay(
            env,
            trajectory.seed,
            trajectory.task,
            [transition.action for transition in recorded[:t]],
            rewards=[transition.reward for transition in recorded[:t]],
            messages=[transition.messages for transition in recorded[: t + 1]],
            timeout=STEP_TIMEOUT,
        )
        for number, _ in enumerate(steps):
            self.num_steps += number > 0

    def _plans(self, env: TextEnv, trajectory: Trajectory, t: int) -> list[tuple[str, ...]]:
        """Return the suffixes of the reference actions, the nearest to the progress first."""
        self._reach(env, trajectory, t)
        find = getattr(env.unwrapped, "reference_actions", None)
        if find is None:
            raise ConfigurationError(
                "The environment has no reference_actions(), which the oracle needs. Add that "
                "method, or diagnose with --by model."
            )
        try:
            reference = list(find())
        except NotImplementedError:  # this task has none
            return []
        num_done = 0
        for transition in trajectory.transitions[:t]:
            num_done += num_done < len(reference) and reference[num_done] == transition.action
        starts = sorted(range(len(reference)), key=lambda i: abs(i - num_done))
        return [tuple(reference[i:]) for i in starts[:MAX_PLANS]]

    def _succeeds(self, env: TextEnv, trajectory: Trajectory, t: int, plan: Sequence[str]) -> bool:
        self._reach(env, trajectory, t)
        for action in plan:
            self.num_steps += 1
            *_, terminated, truncated, info = resolve(env.step(action), STEP_TIMEOUT)
            if terminated or truncated:
                return float(info.get("metrics", {}).get("success", 0.0)) > 0.0
        return False
