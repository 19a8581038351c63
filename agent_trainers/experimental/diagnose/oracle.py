"""Diagnosis of failed episodes: the last state from which the task could still be solved."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.async_bridge import resolve
from agent_envs.core.replay import replay
from agent_envs.errors import ConfigurationError, ReplayError
from agent_trainers.rollout.environments import MakeEnv, TextEnv
from agent_trainers.trajectory import Trajectory

MAX_PLANS: Final = 32
"""Plans tried at a state, those closest to the progress so far first."""
STEP_TIMEOUT: Final = 300.0
"""Seconds that an async reset or step may take."""
NEVER_SOLVED: Final = "the reference actions solve it from no state, so no step can be named"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnosis of one episode."""

    trajectory: Trajectory
    """The failed episode."""
    lost_step: int | None = None
    """Step, from 0, after which the task could no longer be solved; None if none can be named."""
    solution: tuple[str, ...] = ()
    """Actions that solve the task from the state before that step."""
    note: str = ""
    """Reason why no step is named."""


def diagnose_by_oracle(make_env: MakeEnv, trajectories: Sequence[Trajectory]) -> list[Diagnosis]:
    """Try the task's reference actions from the states of failed episodes.

    At a state the oracle asks for ``reference_actions()`` and tries every suffix of them. A state
    from which one succeeds, and all states before it, can still be won. An episode in which the
    environment raises or differs from the recording is not diagnosed; see its note.

    Raises:
        ConfigurationError: If the environment has no ``reference_actions()``.
        ReplayError: If no episode can be replayed.
    """
    errors: list[BaseException] = []
    diagnoses: list[Diagnosis] = []
    for trajectory in trajectories:
        try:
            with contextlib.closing(make_env()) as env:
                diagnoses.append(_diagnose(env, trajectory))
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, noted
            note = f"{type(error).__name__}: {error}"
            diagnoses.append(Diagnosis(trajectory=trajectory, note=note))
            errors.append(error)
    if len(errors) == len(trajectories) and isinstance(errors[0], ReplayError):
        raise errors[0]
    return diagnoses


def _diagnose(env: TextEnv, trajectory: Trajectory) -> Diagnosis:
    if trajectory.seed is None:
        raise ReplayError(f"task {trajectory.task_id!r}: the file has no seed to replay from.")
    for t in reversed(range(len(trajectory.transitions))):
        for plan in _plans(env, trajectory, t):
            if _succeeds(env, trajectory, t, plan):
                return Diagnosis(trajectory=trajectory, lost_step=t, solution=plan)
    return Diagnosis(trajectory=trajectory, note=NEVER_SOLVED)


def _reach(env: TextEnv, trajectory: Trajectory, t: int) -> None:
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
    for _ in steps:
        pass


def _plans(env: TextEnv, trajectory: Trajectory, t: int) -> list[tuple[str, ...]]:
    """Return the suffixes of the reference actions, the nearest to the progress first."""
    _reach(env, trajectory, t)
    find: Any = getattr(env.unwrapped, "reference_actions", None)
    if find is None:
        raise ConfigurationError(
            "The environment has no reference_actions(), which the diagnosis needs."
        )
    try:
        reference: list[str] = list(find())
    except NotImplementedError:  # this task has none
        return []
    num_done = 0
    for transition in trajectory.transitions[:t]:
        num_done += num_done < len(reference) and reference[num_done] == transition.action
    starts = sorted(range(len(reference)), key=lambda i: abs(i - num_done))
    return [tuple(reference[i:]) for i in starts[:MAX_PLANS]]


def _succeeds(env: TextEnv, trajectory: Trajectory, t: int, plan: Sequence[str]) -> bool:
    _reach(env, trajectory, t)
    for action in plan:
        *_, terminated, truncated, info = resolve(env.step(action), STEP_TIMEOUT)
        if terminated or truncated:
            return float(info.get("metrics", {}).get("success", 0.0)) > 0.0
    return False
