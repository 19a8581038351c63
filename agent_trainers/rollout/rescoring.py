"""Judge recorded episodes, again or for the first time, without their environments."""

from collections.abc import Mapping
from dataclasses import replace

from agent_envs.core.messages import new_text
from agent_envs.errors import DataError, ServerError
from agent_envs.judges import BaseJudge
from agent_trainers.trajectory import StopReason, Trajectory


def rescore(trajectory: Trajectory, judges: Mapping[str, tuple[BaseJudge, float]]) -> Trajectory:
    """Return a trajectory with the terms of judges, by name with their weights.

    A failed judgement makes it unscorable; states that a context shortened are a DataError.
    """
    if not trajectory.is_scorable:
        return trajectory
    observations, actions = episode_texts(trajectory)
    steps, is_over = [], trajectory.stop_reason in (StopReason.ANSWERED, StopReason.TURN_LIMIT)
    for t, step in enumerate(trajectory.transitions, start=1):
        terms, judgements = dict(step.reward_terms), dict(step.info.get("judgements", {}))
        for name, (judge, weight) in judges.items():
            is_last = is_over and t == len(actions)
            try:
                value, found = judge.term(observations[:t], actions[:t], is_last=is_last)
            except ServerError as error:
                failed = StopReason.ENVIRONMENT_ERROR
                return replace(trajectory, stop_reason=failed, error=str(error))
            terms[name] = weight * value
            if found and judgements.setdefault(judge.name, found)["record"] != found["record"]:
                raise DataError(
                    f"Task {trajectory.task_id!r}, step {t}: the recorded states are not what was "
                    "judged. Record episodes with context='full'."
                )
            judgements |= {judge.name: found} if found else {}
        info = {**step.info, "judgements": judgements} if judgements else step.info
        reward = float(sum(terms.values()))
        steps.append(replace(step, reward=reward, reward_terms=terms, info=info))
    return replace(trajectory, transitions=steps)


def episode_texts(trajectory: Trajectory) -> tuple[list[str], list[str]]:
    """Return observations and actions; an observation is what follows the action before it."""
    observations = [new_text(step.messages) for step in trajectory.transitions]
    return observations, [step.action for step in trajectory.transitions]
