"""Agents of one's own: a function, or a class, of which each turn is asked.

::

    def act(state):                        # kind: my_agent:act
        if not state.memory:
            state.memory["searched"] = True
            return state.call("search", query=state.question)
        return state.answer(state.observation.splitlines()[0])

A class is made once, with the agent's settings, and its method ``act`` is asked (``kind:
my_agent:MyAgent``). A class with the methods of `agent_leaderboard.agents.agent.Agent` plays whole
episodes in its own way instead.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import Agent, PlayedEpisode, tool_env
from agent_leaderboard.agents.repeated_play import total_usage
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec

CONCURRENCY: Final = "concurrency"
"""The setting that says how many turns may be asked for at once, each in a thread; 1 if not given.
An agent that waits for a server wants more."""
_NOT_ITS_OWN: Final = (CONCURRENCY, "tool_format")
"""Settings that say how an agent is asked; it does not get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What an agent knows when it has to act."""

    messages: Sequence[Message]
    """The conversation so far, as a model would be shown it: system prompt, question, results."""
    tools: Sequence[dict[str, Any]]
    """The tools, as OpenAI's API takes them."""
    memory: dict[str, Any]
    """The agent's own, empty when an episode begins, and kept until its end."""
    rng: np.random.Generator
    """For every draw: the same when the episode is played again."""
    tool_format: ToolFormat
    """How actions are written."""

    @property
    def question(self) -> str:
        """The task: the first thing that was said to the agent."""
        return str(next(m["content"] for m in self.messages if m["role"] == "user"))

    @property
    def observation(self) -> str:
        """What was said last: the question, or a tool's result."""
        return str(self.messages[-1]["content"])

    def call(self, name: str, /, **arguments: Any) -> str:
        """Write a call of a tool: return it from ``act``."""
        return self.tool_format.write_call(name, arguments)

    def answer(self, text: str) -> str:
        """Write an answer: return it from ``act``."""
        return self.tool_format.write_answer(text)


Act = Callable[[State], str | Generation]


class ActingAgent:
    """Plays with a function that is asked for each turn."""

    def __init__(self, act: Act, name: str, concurrency: int) -> None:
        """Ask `act`, `concurrency` turns at once; errors call it `name`."""
        self._act, self._name, self._concurrency = act, name, concurrency

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """Raise nothing: what it cannot play it fails."""

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Play one episode per spec, in order."""
        env = make_env()
        policy = _Acting(self._act, self._name, self._concurrency, tool_env(env).action_format)
        env.close()
        with closing(Rollout(make_env, policy)) as rollout:
            played = rollout.collect(specs)
        return [PlayedEpisode(trajectory=t, usage=total_usage([t])) for t in played]


class _Acting(Policy):
    """The turns of one call of `play`; what the agent raises ends its episode."""

    def __init__(self, act: Act, name: str, concurrency: int, tool_format: ToolFormat) -> None:
        self._act, self._name, self._format = act, name, tool_format
        self.max_concurrency = concurrency
        self._memories: dict[int, dict[str, Any]] = {}  # by episode

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Ask for an action in each state."""
        return [self._generation(request) for request in requests]

    def _generation(self, request: GenerationRequest) -> Generation:
        state = State(
            messages=[dict(message) for message in request.messages],  # type: ignore[misc]
            tools=request.tools or [],
            memory=self._memories.setdefault(request.episode_id, {}),
            rng=request.rng,
            tool_format=self._format,
        )
        said = self._act(state)
        if isinstance(said, Generation):
            return said
        if isinstance(said, str):
            return Generation(text=said, usage=Usage())
        raise TypeError(
            f"{self._name} returned {type(said).__name__}; it must return the text of a turn, such "
            "as state.answer('...'), or a Generation with a text."
        )


def build_own_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build the agent of an import path with its settings.

    Raises:
        ConfigurationError: If it cannot be imported or made, or is no agent; says why.
    """
    try:
        found: Any = pkgutil.resolve_name(kind)
        plays_itself: bool = inspect.isclass(found) and hasattr(found, "play")
        if plays_itself:
            agent: Agent = found(**settings)
            return agent
        own = {name: value for name, value in settings.items() if name not in _NOT_ITS_OWN}
        act = _acting_function(kind, found, own)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"The agent {kind!r} cannot be made ({type(error).__name__}: {error}). A kind is "
            "'package.module:name' of a class or a function, importable from here; a class takes "
            "the settings by name."
        ) from error
    concurrency = settings.get(CONCURRENCY, 1)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigurationError(
            f"The setting {CONCURRENCY!r} of {kind!r} must be a whole number from 1, not "
            f"{concurrency!r}."
        )
    return ActingAgent(act, kind, concurrency)


def _acting_function(kind: str, found: Any, settings: Mapping[str, Any]) -> Act:
    if inspect.isclass(found):
        act = getattr(found(**settings), "act", None)
        if act is None:
            raise TypeError(f"{found.__name__} has neither a method 'act(state)' nor 'play'")
    else:
        act = found
        if settings:
            raise TypeError(f"a function takes no settings ({', '.join(settings)}); a class does")
    inspect.signature(act).bind(None)  # a TypeError where it does not take a state
    return act  # type: ignore[no-any-return]
