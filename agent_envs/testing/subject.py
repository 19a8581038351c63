"""What is checked: an environment as it is, and in other tool formats."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_envs.errors import ConfigurationError
from agent_envs.testing.episodes import TextEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The environment that is checked, in one tool format."""

    make_env: Callable[[], TextEnv]
    spec: EnvSpec | None
    """How ``gym.make`` made it, if that did."""
    tool_format: str | None
    """None for the only one, and where it has none."""
    episodes: int
    seed: int

    def make(self, **changes: Any) -> TextEnv:
        """Make the environment; with changes, if ``gym.make`` can."""
        if self.tool_format is not None:
            changes["tool_format"] = self.tool_format
        if self.spec is None or not changes:
            return self.make_env()
        return self.spec.make(**changes)


class NotOffered(Exception):
    """Why there is nothing to check."""


def make_subjects(make_env: Callable[[], TextEnv], episodes: int, seed: int) -> list[Subject]:
    """Return the environment as it is, and in every other tool format that it takes."""
    env = make_env()
    if not isinstance(env, gym.Env):
        raise ConfigurationError(f"{type(env).__name__} is no Gymnasium environment.")
    with env:
        own = getattr(env.unwrapped, "tool_format", None)
        subject = Subject(
            make_env=make_env, spec=env.spec, tool_format=None, episodes=episodes, seed=seed
        )
    subjects = [subject]
    for name in TOOL_FORMATS if own and env.spec else ():
        other = replace(subject, tool_format=name)
        with contextlib.suppress(TypeError, ValueError):  # no such argument, or a refusal
            other.make().close()
            subjects += [other] if name != own else []
    return subjects
