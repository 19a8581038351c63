"""The table of environments: id, class, defaults and turn limit."""

from typing import Final

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, WrapperSpec

_WRAPPERS: Final = (
    WrapperSpec("KnownTurnLimit", "agent_envs.wrappers.turn_limit:KnownTurnLimit", {}),
)

ENVIRONMENTS: Final = (
    EnvSpec(
        "AgentR1/HotpotQA-v0",
        "agent_envs.envs.multihop_qa:HotpotQAEnv",
        max_episode_steps=5,
        additional_wrappers=_WRAPPERS,
    ),
    EnvSpec(
        "AgentR1/SyntheticMultiHop-v0",
        "agent_envs.envs.synthetic:SyntheticMultiHopEnv",
        max_episode_steps=4,
        additional_wrappers=_WRAPPERS,
    ),
    EnvSpec(
        "AgentR1/SyntheticLongHorizon-v0",
        "agent_envs.envs.synthetic:SyntheticMultiHopEnv",
        max_episode_steps=10,
        kwargs={"questions": 3},
        additional_wrappers=_WRAPPERS,
    ),
)


def register_all() -> None:
    """Put every row of the table into Gymnasium's registry."""
    for spec in ENVIRONMENTS:
        if spec.id not in gym.registry:
            gym.register(
                spec.id,
                spec.entry_point,
                max_episode_steps=spec.max_episode_steps,
                kwargs=spec.kwargs,
                additional_wrappers=spec.additional_wrappers,
            )
