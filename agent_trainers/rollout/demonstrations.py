"""Demonstrations: reference episodes and recorded trajectories, tokenised for SFT.

States and actions go through the same renderer as in reinforcement learning, so supervised training
sees the tokens and masks that are sampled and trained later.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_trainers.policies.policy import Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import MakeEnv, describe_env, template_tools
from agent_trainers.trajectory import StopReason, Trajectory, Transition


def play_reference(
    make_env: MakeEnv, renderer: ChatRenderer, tasks: Sequence[int]
) -> Iterator[Trajectory]:
    """Solve each task by the environment's ``reference_actions()``.

    Raises:
        ConfigurationError: If the environment has none.
    """
    env = make_env()
    try:
        reference = getattr(env.unwrapped, "reference_actions", None)
        if reference is None:
            raise ConfigurationError(
                "The environment has no reference_actions() to demonstrate its tasks with. Add "
                "that method, or use recorded trajectories."
            )
        for task in tasks:
            _, info = env.reset(seed=task, options={"task": task})
            tools = template_tools(info)
            steps: list[Transition] = []
            for action in reference():
                state = info["messages"]
                if info.get("context", {}).get("is_summary_requested"):
                    raise ConfigurationError(
                        f"Task {task}: the context requests a summary, and reference_actions() has "
                        "none. Demonstrate with another context, or with recorded trajectories."
                    )
                _, reward, terminated, truncated, info = env.step(action)
                steps.append(
                    Transition(
                        messages=state,
                        prompt_ids=[],
                        completion_ids=[],
                        logprobs=np.zeros(0, np.float32),
                        action=action,
                        reward=float(reward),
                        reward_terms=info.get("reward_terms", {}),
                        terminated=terminated,
                        truncated=truncated,
                        info={},
                    )
                )
                if terminated or truncated:
                    break
            task_id = str(info.get("task_id", task))
            played = Trajectory(
                task_id=task_id,
                group_id=task_id,
                transitions=steps,
                metrics=dict(info.get("metrics", {})),
                timings={},
                stop_reason=StopReason.ANSWERED,
                **describe_env(env),
                task=task,
                seed=task,
            )
            yield retell(played, renderer, tools)
    finally:
        env.close()


def retell(trajectory: Trajectory, renderer: ChatRenderer, tools: Schemas) -> Trajectory:
    """Return a trajectory in the tokens of another model; of `info` only the roles stay."""
    steps: list[Transition] = []
    for t in trajectory.transitions:
        ids = renderer.turn_ids(t.action)
        steps.append(
            dataclasses.replace(
                t,
                prompt_ids=renderer.prompt_ids(t.messages, tools, steps[-1] if steps else None),
                completion_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                info={name: t.info[name] for name in ("agent_role", "is_frozen") if name in t.info},
            )
        )
    return dataclasses.replace(trajectory, transitions=steps)
