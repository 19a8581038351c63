"""Who acts: the base class of every policy, and of those that act through another one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from agent_envs.core.contexts import estimate_tokens
from agent_envs.core.messages import Message
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.streams import (
    ConcurrentStream,
    GenerationStream,
    StreamedResult,
    WaveStream,
)

Result = TypeVar("Result")


class Policy(ABC):
    """Turns states into actions, many at once.

    A policy of your own needs `generate` alone::

        class Echo(Policy):
            def generate(self, requests):
                return [Generation(text=r.messages[-1]["content"]) for r in requests]
    """

    max_concurrency: int | None = None
    """How many calls of `generate` a rollout may have under way at once, each in a thread of its
    own and with one request; None: one call at a time, with all states that wait."""
    sampling: Mapping[str, float] = MappingProxyType({})
    """How tokens are drawn, by the names of `SamplingSettings`; empty where it is not known."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""

    def open_stream(self) -> GenerationStream:
        """Return what serves the episodes of one rollout."""
        if self.max_concurrency is not None:
            return ConcurrentStream(self.generate, self.max_concurrency)
        return WaveStream(self.generate)

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state; an estimate if the policy does not know better."""
        return estimate_tokens(messages)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state: none where only a server knows, None if it does not fit."""
        return []

    def decode(self, completion_ids: Sequence[int]) -> str | None:
        """Return sampled tokens as text; None where only a server knows tokens."""
        return None

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Say whether the model sees the tools of a request."""
        return True


class PolicyWrapper(Policy):
    """Acts through another policy, and generates as that one does: in slots, waves or threads.

    Override `before` to change what it is asked, `after` to change what it answers.
    """

    def __init__(self, policy: Policy) -> None:
        """Act through `policy`."""
        self.policy = policy
        self.max_concurrency = policy.max_concurrency
        self.sampling = policy.sampling

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Return what the policy is asked, or the action itself: then it is not asked."""
        return request

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Return what is made of the policy's turn; `request` is as it was before `before`."""
        return generation

    def forget(self, episode_id: int) -> None:
        """Forget an episode, which is over; another one may get its number."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""
        asked = [self.before(request) for request in requests]
        replies = iter(
            self.policy.generate([each for each in asked if isinstance(each, GenerationRequest)])
        )
        return [
            each if isinstance(each, Generation) else self.after(request, next(replies))
            for request, each in zip(requests, asked, strict=True)
        ]

    def open_stream(self) -> GenerationStream:
        """Return the policy's own stream, with `before` and `after` around it."""
        return _WrappedStream(self, self.policy.open_stream())

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state."""
        return self.policy.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state, as the policy sees it without this wrapper."""
        return self.policy.encode(request)

    def decode(self, completion_ids: Sequence[int]) -> str | None:
        """Return sampled tokens as text."""
        return self.policy.decode(completion_ids)

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Say whether the model sees the tools of a request."""
        return self.policy.shows_tools(tools)


class _WrappedStream(GenerationStream):
    """A stream with a wrapper's `before` and `after` around it."""

    def __init__(self, wrapper: PolicyWrapper, stream: GenerationStream) -> None:
        super().__init__()
        self._wrapper, self._stream = wrapper, stream
        self._requests: dict[int, GenerationRequest] = {}  # the newest of each episode
        self._ready: dict[int, Generation | BaseException] = {}
        self.gathers = stream.gathers

    @property
    def has_requests(self) -> bool:
        return bool(self._ready) or self._stream.has_requests

    def add(self, key: int, request: GenerationRequest) -> None:
        self._requests[key] = request
        asked = _result_of(self._wrapper.before, request)
        if isinstance(asked, GenerationRequest):
            self._stream.add(key, asked)
        else:
            self._ready[key] = asked

    def advance(self) -> list[StreamedResult]:
        ready, self._ready = list(self._ready.items()), {}
        for key, result in self._stream.advance():
            if isinstance(result, Generation):
                result = _result_of(self._wrapper.after, self._requests[key], result)
            ready.append((key, result))
        return ready

    def drop(self, key: int) -> None:
        self._ready.pop(key, None)
        self._stream.drop(key)
        if (request := self._requests.pop(key, None)) is not None:
            self._wrapper.forget(request.episode_id)

    def rest(self, key: int) -> None:
        self._stream.rest(key)

    def close(self) -> None:
        self._stream.close()


def _result_of(function: Callable[..., Result], *arguments: Any) -> Result | Exception:
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - a wrapper is foreign code; it costs its episode
        return error
