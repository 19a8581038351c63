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
from typing import Any, cast

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import (
    Agent,
    MakeEnv,
    PlayedEpisode,
    collect,
    tool_env,
    total_usage,
)
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.rollout.episode import EpisodeSpec


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


class ActingAgent(Policy, Agent):
    """Runs episodes with a function that is called for each turn; an exception ends an episode."""

    def __init__(self, act: Act, name: str, concurrency: int) -> None:
        """Call `act` for up to `concurrency` turns at once; errors name `name`."""
        self._act, self._name, self.max_concurrency = act, name, concurrency

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        with closing(make_env()) as env:
            self._format = tool_env(env).action_format
        self._memories: dict[int, dict[str, Any]] = {}  # by episode
        trajectories = collect(make_env, self, specs)
        return [PlayedEpisode(trajectory=t, usage=total_usage([t])) for t in trajectories]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Ask the agent for each turn."""
        return [self._turn(request) for request in requests]

    def _turn(self, request: GenerationRequest) -> Generation:
        reply = self._act(State(
            messages=[dict(message) for message in request.messages],  # type: ignore[misc]
            tools=request.tools or [],
            memory=self._memories.setdefault(request.episode_id, {}),
            rng=request.rng,
            tool_format=self._format,
        ))  # fmt: skip
        if isinstance(reply, str):
            return Generation(text=reply, usage=Usage())
        if not isinstance(reply, Generation):
            raise TypeError(
                f"{self._name} returned {type(reply).__name__}; it must return the text of a turn, "
                "such as state.answer('...'), or a Generation with a text."
            )
        return reply


def make_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build the agent of an import path with its settings.

    ``concurrency`` is the number of concurrent turns, in threads, 1 by default; agents that wait
    for a server want more. Neither it nor ``tool_format`` is given to the agent.
    """
    concurrency = settings.get("concurrency", 1)
    own = {k: v for k, v in settings.items() if k not in ("concurrency", "tool_format")}
    try:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"'concurrency' must be a positive integer, not {concurrency!r}")
        found: Any = pkgutil.resolve_name(kind)
        if hasattr(found, "play"):
            return cast(Agent, found(**settings))
        if inspect.isclass(found):
            made: Any = found(**own)
            found, own = made.act, {}
        if own:
            raise TypeError("it is a function, which takes no settings")
        inspect.signature(found).bind(None)  # TypeError if it does not take a state
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"The agent {kind!r} cannot be made ({type(error).__name__}: {error}). A kind is "
            "'package.module:name' of an importable class or function; a class takes the settings "
            "by name."
        ) from error
    return ActingAgent(found, kind, concurrency)
