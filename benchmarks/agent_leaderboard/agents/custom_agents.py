"""Custom agents: a function, or a class, that is called for each turn.

::

    def act(state):                        # kind: my_agent:act
        if not state.memory:
            state.memory["searched"] = True
            return state.call("search", query=state.question)
        return state.answer(state.observation.splitlines()[0])

A class is instantiated once, with the agent's settings, and its method ``act`` is called (``kind:
my_agent:MyAgent``). A class with the methods of `agent_leaderboard.agents.agent.Agent` runs whole
episodes instead.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import Agent, PlayedEpisode, tool_env
from agent_leaderboard.agents.repeated_attempts import total_usage
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec

CONCURRENCY: Final = "concurrency"
"""Setting with the number of concurrent turns, in threads; 1 by default. Agents that wait for a
server want more."""
_RUN_SETTINGS: Final = (CONCURRENCY, "tool_format")
"""Settings that the agent itself does not get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Input of an agent's turn."""

    messages: Sequence[Message]
    """The conversation as a model reads it: system prompt, question, results."""
    tools: Sequence[dict[str, Any]]
    """Tool schemas in OpenAI's format."""
    memory: dict[str, Any]
    """The agent's own data, empty when an episode begins and kept until its end."""
    rng: np.random.Generator
    """Generator for every draw: the same when the episode runs again."""
    tool_format: ToolFormat

    @property
    def question(self) -> str:
        """The task: the first user message."""
        return str(next(m["content"] for m in self.messages if m["role"] == "user"))

    @property
    def observation(self) -> str:
        """The last message: the question, or a tool's result."""
        return str(self.messages[-1]["content"])

    def call(self, name: str, /, **arguments: Any) -> str:
        """Write a tool call, to be returned by ``act``."""
        return self.tool_format.write_call(name, arguments)

    def answer(self, text: str) -> str:
        """Write an answer, to be returned by ``act``."""
        return self.tool_format.write_answer(text)


Act = Callable[[State], str | Generation]


class ActingAgent:
    """Runs episodes with a function that is called for each turn."""

    def __init__(self, act: Act, name: str, concurrency: int) -> None:
        """Call `act` for up to `concurrency` turns at once; errors name `name`."""
        self._act, self._name, self._concurrency = act, name, concurrency

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """Accept every environment."""

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        with closing(make_env()) as env:
            tool_format = tool_env(env).action_format
        policy = _ActingPolicy(self._act, self._name, self._concurrency, tool_format)
        with closing(Rollout(make_env, policy)) as rollout:
            trajectories = rollout.collect(specs)
        return [PlayedEpisode(trajectory=t, usage=total_usage([t])) for t in trajectories]


class _ActingPolicy(Policy):
    """Policy of a custom agent; an exception of the agent ends its episode."""

    def __init__(self, act: Act, name: str, concurrency: int, tool_format: ToolFormat) -> None:
        self._act, self._name, self._format = act, name, tool_format
        self.max_concurrency = concurrency
        self._memories: dict[int, dict[str, Any]] = {}  # by episode

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._generation(request) for request in requests]

    def _generation(self, request: GenerationRequest) -> Generation:
        state = State(
            messages=[dict(message) for message in request.messages],  # type: ignore[misc]
            tools=request.tools or [],
            memory=self._memories.setdefault(request.episode_id, {}),
            rng=request.rng,
            tool_format=self._format,
        )
        reply = self._act(state)
        if isinstance(reply, Generation):
            return reply
        if isinstance(reply, str):
            return Generation(text=reply, usage=Usage())
        raise TypeError(
            f"{self._name} returned {type(reply).__name__}; it must return the text of a turn, "
            "such as state.answer('...'), or a Generation with a text."
        )


def build_custom_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build the agent of an import path with its settings.

    Raises:
        ConfigurationError: If it cannot be imported or made, or is not an agent.
    """
    try:
        found: Any = pkgutil.resolve_name(kind)
        if inspect.isclass(found) and hasattr(found, "play"):
            return cast(Agent, found(**settings))
        own = {name: value for name, value in settings.items() if name not in _RUN_SETTINGS}
        act = _acting_function(found, own)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"The agent {kind!r} cannot be made ({type(error).__name__}: {error}). A kind is "
            "'package.module:name' of an importable class or function; a class takes the settings "
            "by name."
        ) from error
    concurrency = settings.get(CONCURRENCY, 1)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigurationError(
            f"The setting {CONCURRENCY!r} of {kind!r} must be a positive integer, not "
            f"{concurrency!r}."
        )
    return ActingAgent(act, kind, concurrency)


def _acting_function(found: Any, settings: Mapping[str, Any]) -> Act:
    if inspect.isclass(found):
        act = getattr(found(**settings), "act", None)
        if act is None:
            raise TypeError(f"{found.__name__} has neither a method 'act(state)' nor 'play'")
    else:
        act = found
        if settings:
            raise TypeError(f"a function takes no settings ({', '.join(settings)}); a class does")
    inspect.signature(act).bind(None)  # TypeError if it does not take a state
    return act  # type: ignore[no-any-return]
