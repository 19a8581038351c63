"""Demonstrations: reference episodes and recorded trajectories, tokenised for SFT.

States and actions go through the same renderer as in reinforcement learning, so supervised training
sees the tokens and masks that are sampled and trained later.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_envs.wrappers.awaited import awaited
from agent_trainers.policies.policy import Generation, Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import MakeEnv, read_reset, template_tools
from agent_trainers.rollout.episode import Episode
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import StopReason, Trajectory, Transition

_KEPT: Final = ("agent_role", "is_frozen", "finish_reason")


def play_reference(
    make_env: MakeEnv, renderer: ChatRenderer, tasks: Sequence[int]
) -> Iterator[Trajectory]:
    """Solve each task by the environment's ``reference_actions()``.

    Raises:
        ConfigurationError: If the environment has none.
    """
    with contextlib.closing(awaited(make_env())) as env:
        inner: Any = env.unwrapped
        if not hasattr(inner, "reference_actions"):
            raise ConfigurationError(
                "The environment has no reference_actions() to demonstrate its tasks with. Add "
                "that method, or use recorded trajectories."
            )
        for number, spec in enumerate(plan_samples(tasks, 1, seed=0)):
            episode = Episode(number, spec)
            episode.env = env
            episode.info = read_reset(episode.reset())
            tools = template_tools(episode.info)
            for action in inner.reference_actions():
                if (episode.info.get("context") or {}).get("is_summary_requested"):
                    raise ConfigurationError(
                        f"Task {spec.task}: the context requests a summary, and "
                        "reference_actions() has none. Demonstrate with another context, or with "
                        "recorded trajectories."
                    )
                episode.generation = Generation(text=action)
                episode.advance(episode.step())
                if episode.stop_reason is not None:
                    break
            else:
                episode.stop(StopReason.ANSWERED)
            yield retell(episode.trajectory(), renderer, tools)


def retell(trajectory: Trajectory, renderer: ChatRenderer, tools: Schemas) -> Trajectory:
    """Return a trajectory in the tokens of another model; of `info` only `_KEPT` stays."""
    steps: list[Transition] = []
    for t in trajectory.transitions:
        ids = renderer.turn_ids(t.action)
        steps.append(
            dataclasses.replace(
                t,
                prompt_ids=renderer.prompt_ids(t.messages, tools, steps[-1] if steps else None),
                completion_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                info={name: t.info[name] for name in _KEPT if name in t.info},
            )
        )
    return dataclasses.replace(trajectory, transitions=steps)
