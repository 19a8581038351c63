"""GEM (``gem-llm``): our environments in ``gem.make``, and its environments as ours.

::

    register("AgentR1/SyntheticMultiHop-v0")
    env = gem.make("AgentR1/SyntheticMultiHop-v0")
    env = gym.make("agent_envs.adapters.gem:AgentR1/GEM-v0", env_id="game:Sudoku-v0-easy")

GEM has observations only, and no messages, so the first one begins with the system prompt and the
tools. Its infos hold the rest.
"""

import copy
from collections.abc import Callable, Sequence
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
        """Take one model turn."""
        episode = self._episode
        text = episode.step(action) and episode.text
        return text, episode.reward, episode.terminated, episode.truncated, dict(episode.info)

    def sample_random_action(self) -> str:
        """Draw a text."""
        return self._episode.env.action_space.sample()

    def spawn(self, same_state: bool = False, **kwargs: Any) -> Self:
        """Make another one with changed arguments, or a copy in the same state."""
        if same_state:
            return copy.deepcopy(self)
        id, own = self._made_with
        return type(self)(id, **(own | kwargs))


class GEMEnv(ForeignEnv):
    """An environment of GEM as one of ours. A task is a seed of its reset."""

    draws_globally = True

    def __init__(
        self,
        *,
        env_id: str,
        wrappers: Sequence[Callable[[Any], Any]] = (),
        observes_state: bool = False,
        **kwargs: Any,
    ) -> None:
        """Make the environment.

        Args:
            env_id: Its id, as for ``gem.make``.
            wrappers: Wrappers, the innermost first, such as GEM's tools.
            observes_state: Whether its observations are whole states, as those of GEM's wrappers
                that concatenate; else each is the next message of a conversation.
            kwargs: Its other arguments, as for ``gem.make``.
        """
        super().__init__(env_id)
        self._observes_state = observes_state
        with self._own_random():  # some environments draw when they are made
            self._env = gem.make(env_id, **kwargs)
            for wrapper in wrappers:
                self._env = wrapper(self._env)

    def begin(self, task: int) -> list[Message]:
        """Begin the episode of a seed."""
        observation, _ = self._env.reset(seed=task)
        return [Message(role="user", content=observation)]

    def act(self, action: str) -> Reply:
        """Take one model turn."""
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Reply(
            text=observation,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            is_state=self._observes_state,
        )


def register(*ids: str) -> None:
    """Register environments of ours with GEM, under their Gymnasium ids."""
    for id in ids:
        if id not in ENV_REGISTRY:
            gem.register(id, partial(OwnEnv, id))


gym.register("AgentR1/GEM-v0", f"{__name__}:GEMEnv", order_enforce=False, disable_env_checker=True)
