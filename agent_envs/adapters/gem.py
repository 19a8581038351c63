"""GEM (``gem-llm``): our environments in ``gem.make``, and its environments as ours."""

import copy
from functools import partial
from typing import Any, Self

import gem
import gem.envs  # registers its environments
import gymnasium as gym
from gem.envs.registration import ENV_REGISTRY

from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.adapters.own_episode import OwnEpisode
from agent_envs.core.messages import Message


class OwnEnv(gem.Env):
    """An environment of ours as one of GEM's."""

    def __init__(self, id: str, *, seed: int | None = None, **kwargs: Any) -> None:
        """Make the environment as ``gymnasium.make(id, **kwargs)`` does.

        `seed` is for the first reset without one; ``gem.make_vec`` gives each member its own.
        """
        super().__init__()
        self._first_seed = seed
        self._made_with = (id, kwargs)
        self._episode = OwnEpisode(id, kwargs, only_text_in="GEM")

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the first observation is the prompt, the tools and the question."""
        # Without super().reset(), which would seed the process's global generators.
        seed, self._first_seed = self._first_seed if seed is None else seed, None
        self._episode.reset(seed=seed)
        return self._episode.opening, dict(self._episode.info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        episode = self._episode
        text = episode.step(action) and episode.text
        return text, episode.reward, episode.terminated, episode.truncated, dict(episode.info)

    def spawn(self, same_state: bool = False, **kwargs: Any) -> Self:
        """Make another one with changed arguments, or a copy in the same state."""
        if same_state:
            return copy.deepcopy(self)
        id, own = self._made_with
        return type(self)(id, **(own | kwargs))


class GEMEnv(ForeignEnv):
    """An environment of GEM as one of ours. A task is a seed of its reset."""

    draws_globally = True

    def __init__(self, *, env_id: str, **kwargs: Any) -> None:
        """Make the environment, as ``gem.make(env_id, **kwargs)`` does."""
        super().__init__(env_id)
        with self._own_random():  # some environments draw when they are made
            self._env = gem.make(env_id, **kwargs)

    def begin(self, task: int) -> list[Message]:
        observation, _ = self._env.reset(seed=task)
        return [Message(role="user", content=observation)]

    def act(self, action: str) -> Reply:
        text, reward, terminated, truncated, _ = self._env.step(action)
        return Reply(
            text=text, reward=float(reward), terminated=bool(terminated), truncated=bool(truncated)
        )


def register(*ids: str) -> None:
    """Register environments of ours with GEM, under their Gymnasium ids."""
    for id in ids:
        if id not in ENV_REGISTRY:
            gem.register(id, partial(OwnEnv, id))


gym.register("AgentR1/GEM-v0", f"{__name__}:GEMEnv", order_enforce=False, disable_env_checker=True)
