"""Demonstrations: what somebody did, as trajectories in the tokens that a model would write.

Whoever acted (an environment's own reference, another model, a person), states and actions go
through the same renderer as in reinforcement learning, so what is learned from them is what is
sampled and trained later: the same tokens, the same masks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_trainers.policies.rendering import ChatRenderer, Schemas
from agent_trainers.rollout.episode import TextEnv, template_tools
from agent_trainers.trajectory import StopReason, Trajectory, Transition


class Demonstration:
    """An episode that is told step by step."""

    def __init__(self, renderer: ChatRenderer, tools: Schemas) -> None:
        """Begin; `tools` are what the chat template describes."""
        self._renderer, self._tools = renderer, tools
        self._transitions: list[Transition] = []

    def add(
        self, messages: Sequence[Message], action: str, completion_ids: list[int], **outcome: Any
    ) -> None:
        """Tell a step: its state, its action and its tokens; `outcome` are other fields."""
        previous = self._transitions[-1] if self._transitions else None
        defaults = {"reward": 0.0, "reward_terms": {}, "terminated": False, "truncated": False}
        self._transitions.append(
            Transition(
                messages=list(messages),
                prompt_ids=self._renderer.prompt_ids(messages, self._tools, previous),
                completion_ids=completion_ids,
                logprobs=np.zeros(len(completion_ids), np.float32),
                action=action,
                **{**defaults, "info": {}, **outcome},
            )
        )

    def trajectory(self, task_id: str, metrics: Mapping[str, float]) -> Trajectory:
        """Return the whole."""
        return Trajectory(
            task_id=task_id,
            group_id=task_id,
            transitions=self._transitions,
            metrics=dict(metrics),
            timings={},
            stop_reason=StopReason.ANSWERED,
        )


def play_reference(
    make_env: Callable[[], TextEnv], renderer: ChatRenderer, tasks: Sequence[int]
) -> Iterator[Trajectory]:
    """Play each task by the environment's ``reference_actions()``.

    Raises:
        ConfigurationError: If the environment has none.
    """
    env = make_env()
    try:
        reference = getattr(env.unwrapped, "reference_actions", None)
        if reference is None:
            raise ConfigurationError(
                "The environment has no reference_actions(), so it cannot show how its tasks are "
                "solved. Give it that method, or use recorded trajectories."
            )
        for task in tasks:
            _, info = env.reset(seed=task, options={"task": task})
            told = Demonstration(renderer, template_tools(info))
            for action in reference():
                state = info["messages"]
                _, reward, terminated, truncated, info = env.step(action)
                told.add(
                    state,
                    action,
                    renderer.turn_ids(action),
                    reward=float(reward),
                    reward_terms=info.get("reward_terms", {}),
                    terminated=terminated,
                    truncated=truncated,
                )
                if terminated or truncated:
                    break
            yield told.trajectory(str(info.get("task_id", task)), info.get("metrics", {}))
    finally:
        env.close()


def retell(trajectory: Trajectory, renderer: ChatRenderer, tools: Schemas) -> Trajectory:
    """Return a recorded trajectory with the tokens of another model; rewards stay as they are."""
    told = Demonstration(renderer, tools)
    for t in trajectory.transitions:
        told.add(
            t.messages,
            t.action,
            renderer.turn_ids(t.action),
            reward=t.reward,
            reward_terms=t.reward_terms,
            terminated=t.terminated,
            truncated=t.truncated,
        )
    return told.trajectory(trajectory.task_id, trajectory.metrics)
