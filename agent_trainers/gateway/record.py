"""What was played in a session so far, and the trajectory that becomes of it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from agent_trainers.policies.generation import Usage
from agent_trainers.trajectory import StopReason, Trajectory, Transition

Reward = float | Mapping[str, float]
_LIMITS = (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW)


@dataclass(slots=True)
class _Step:
    transition: Transition
    reply_id: str
    reward_terms: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """The steps of an episode with their rewards; steps stand in the order in which they ended."""

    steps: list[_Step] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    generate_seconds: float = 0.0

    def add(self, transition: Transition, reply_id: str) -> None:
        """Add a step; its reward comes later."""
        self.steps.append(_Step(transition, reply_id))

    def reward(self, reward: Reward, term: str, reply_id: str | None = None) -> None:
        """Add to the reward of the newest step, or the newest of a reply.

        Raises:
            ValueError: If there is no such step, or a reward is no finite number.
        """
        terms = reward if isinstance(reward, Mapping) else {term: reward}
        for name, value in terms.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                continue
            raise ValueError(f"The reward {name!r} is {value!r}; it must be a finite number.")
        steps = [step for step in self.steps if reply_id in (None, step.reply_id)]
        if not steps:
            what = "no turn yet" if reply_id is None else f"no turn of a reply {reply_id!r}"
            raise ValueError(f"There is {what} that could be rewarded.")
        earned = steps[-1].reward_terms
        for name, value in terms.items():
            earned[name] = earned.get(name, 0.0) + float(value)

    def trajectory(
        self,
        *,
        task_id: str,
        group_id: str,
        metrics: dict[str, float],
        seconds: float,
        stop_reason: StopReason,
        error: str | None,
    ) -> Trajectory:
        """Return the episode, which is over."""
        transitions = [
            replace(
                step.transition,
                reward=math.fsum(step.reward_terms.values()),
                reward_terms=dict(step.reward_terms),
            )
            for step in self.steps
        ]
        is_truncated = stop_reason in _LIMITS
        final_prompt_ids: list[int] = []
        if transitions:
            last = transitions[-1]
            transitions[-1] = replace(
                last,
                terminated=stop_reason is StopReason.ANSWERED,
                truncated=is_truncated,
            )
            final_prompt_ids = [*last.prompt_ids, *last.completion_ids] if is_truncated else []
        return Trajectory(
            task_id=task_id,
            group_id=group_id,
            transitions=transitions,
            metrics=metrics,
            timings={
                "generate_seconds": self.generate_seconds,
                "environment_seconds": max(0.0, seconds - self.generate_seconds),
            },
            stop_reason=stop_reason,
            error=error,
            usage=asdict(self.usage),
            final_prompt_ids=final_prompt_ids,
        )
