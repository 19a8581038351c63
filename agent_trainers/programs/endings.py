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
    reason = StopReason.TURN_LIMIT if outcome.truncated else StopReason.ANSWERED
    if own is None:
        assert not isinstance(outcome.reward, Mapping)
        trajectory = session.close(outcome.reward, metrics=metrics, default_reason=reason)
    else:
        metrics |= {f"reward/{role}": reward for role, reward in own.items()}
        trajectory = session.close(metrics=metrics, default_reason=reason)
        if (lost := _lost(trajectory.transitions, own)) is not None:
            return _as_fault(trajectory, lost)
        trajectory = replace(trajectory, transitions=_with_own(trajectory.transitions, own))
    return trajectory


def failed(session: Session, error: BaseException) -> Trajectory:
    """Close the session of a program that has failed.

    Where the model's last call met a limit, or the policy failed, that is why: programs raise what
    the endpoint told them. So is a last turn that was cut off: clients raise that themselves, and
    half a turn cannot be read. If such episodes were left out, too long turns would cost nothing.
    """
    reason = StopReason.TOKEN_LIMIT if session.is_cut_off else StopReason.ANSWERED
    trajectory = session.close(metrics={"success": 0.0}, default_reason=reason)
    why = "".join(traceback.format_exception(error))
    if trajectory.stop_reason not in (StopReason.ANSWERED, StopReason.ENVIRONMENT_ERROR):
        return replace(trajectory, error=trajectory.error or why)
    return _as_fault(trajectory, error)


def frozen(trajectory: Trajectory, roles: Collection[str]) -> Trajectory:
    """Mark the steps of roles that nothing is learned from."""
    if not roles:
        return trajectory
    steps = [
        replace(step, info={**step.info, "is_frozen": True}) if step.role in roles else step
        for step in trajectory.transitions
    ]
    return replace(trajectory, transitions=steps)


def _as_fault(trajectory: Trajectory, error: BaseException) -> Trajectory:
    steps = [replace(step, terminated=False, truncated=False) for step in trajectory.transitions]
    return replace(
        trajectory,
        transitions=steps,
        stop_reason=StopReason.ENVIRONMENT_ERROR,
        error="".join(traceback.format_exception(error)),
        final_prompt_ids=[],
    )


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
