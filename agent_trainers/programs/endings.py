"""From what came of a program to the end of its trajectory."""

import traceback
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace

from agent_envs.errors import RolloutError
from agent_trainers.gateway import Session
from agent_trainers.programs.program import Outcome
from agent_trainers.trajectory import StopReason, Trajectory, Transition


def rewarded(session: Session, outcome: Outcome) -> Trajectory:
    """Close the session of a program that has returned."""
    own = outcome.reward if isinstance(outcome.reward, Mapping) else None
    metrics = dict(outcome.metrics)
    if own is None:
        assert not isinstance(outcome.reward, Mapping)
        trajectory = session.close(outcome.reward, metrics=metrics)
    else:
        metrics |= {f"reward/{role}": reward for role, reward in own.items()}
        trajectory = session.close(metrics=metrics)
        if (lost := _lost(trajectory.transitions, own)) is not None:
            return failed(session, lost)
        trajectory = replace(trajectory, transitions=_with_own(trajectory.transitions, own))
    return trajectory


def failed(session: Session, error: BaseException) -> Trajectory:
    """Close the session of a program that has failed.

    Where the model's last call met a limit, or the policy failed, that is why: programs raise what
    the endpoint told them.
    """
    trajectory = session.close(metrics={"success": 0.0})
    if trajectory.stop_reason not in (StopReason.ANSWERED, StopReason.ENVIRONMENT_ERROR):
        return trajectory
    return replace(
        trajectory,
        transitions=[replace(step, terminated=False) for step in trajectory.transitions],
        stop_reason=StopReason.ENVIRONMENT_ERROR,
        error="".join(traceback.format_exception(error)),
    )


def frozen(trajectory: Trajectory, roles: Collection[str]) -> Trajectory:
    """Mark the steps of roles that nothing is learned from."""
    if not roles:
        return trajectory
    steps = [
        replace(step, info={**step.info, "is_frozen": True}) if step.role in roles else step
        for step in trajectory.transitions
    ]
    return replace(trajectory, transitions=steps)


def _lost(steps: list[Transition], own: Mapping[str, float]) -> RolloutError | None:
    """Return what is wrong if none of the roles asked that have a reward; warn of single ones."""
    asked = {step.role for step in steps}
    silent = [role for role in own if role not in asked]
    if not steps or not silent:
        return None
    told = ", ".join(repr(role) for role in sorted(asked))
    if len(silent) == len(own):
        return RolloutError(
            f"The program rewards {', '.join(map(repr, silent))}, and no role of that name asked "
            f"the model in this episode: {told} did."
        )
    for role in silent:
        if own[role] != 0.0:
            text = f"The reward of the role {role!r} is lost where it never asks: {told} did."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return None


def _with_own(steps: list[Transition], own: Mapping[str, float]) -> list[Transition]:
    """Return the steps with each role's reward at its last one, for that role alone."""
    last = {step.role: i for i, step in enumerate(steps)}
    rewards = {i: own[role] for role, i in last.items() if role in own}
    return [
        replace(
            step,
            reward=rewards[i],
            reward_terms={"outcome": rewards[i]},
            info={**step.info, "owns_reward": True},
        )
        if i in rewards
        else step
        for i, step in enumerate(steps)
    ]
