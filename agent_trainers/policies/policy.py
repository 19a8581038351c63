"""Base classes of policies and of wrappers around policies."""

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
    """Maps states to actions, many at once.

    A custom policy only needs `generate`::

        class Echo(Policy):
            def generate(self, requests):
                return [Generation(text=r.messages[-1]["content"]) for r in requests]
    """

    max_concurrency: int | None = None
    """Concurrent calls of `generate` with one request each, in threads; None: one call at a time
    with all pending requests."""
    sampling: Mapping[str, float] = MappingProxyType({})
    """Sampling distribution by the names of `SamplingSettings`; empty if unknown."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""

    def open_stream(self) -> GenerationStream:
        """Return the stream for the episodes of one rollout."""
        if self.max_concurrency is not None:
            return ConcurrentStream(self.generate, self.max_concurrency)
        return WaveStream(self.generate)

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state; by default an estimate."""
        return estimate_tokens(messages)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state: empty if only a server knows them, None if too long."""
        return []

    def decode(self, completion_ids: Sequence[int]) -> str | None:
        """Return sampled tokens as text; None if only a server knows the tokens."""
        return None

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Return whether the model sees the tools of a request."""
        return True


class PolicyWrapper(Policy):
    """A policy around another one, which generates in the other one's stream.

    Override `before` to change requests, `after` to change generations.
    """

    def __init__(self, policy: Policy) -> None:
        """Wrap `policy`."""
        self.policy = policy
        self.max_concurrency = policy.max_concurrency
        self.sampling = policy.sampling

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Return the request for the policy, or an action that replaces its own."""
        return request

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Return the action for the policy's generation; `request` is that before `before`."""
        return generation

    def forget(self, episode_id: int) -> None:
        """Remove the state of an episode that is over; its id may be reused."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""
        changed = [self.before(request) for request in requests]
        replies = iter(
            self.policy.generate([each for each in changed if isinstance(each, GenerationRequest)])
        )
        return [
            each if isinstance(each, Generation) else self.after(request, next(replies))
            for request, each in zip(requests, changed, strict=True)
        ]

    def open_stream(self) -> GenerationStream:
        """Return the policy's stream with `before` and `after` around it."""
        return _WrappedStream(self, self.policy.open_stream())

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state."""
        return self.policy.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state for the wrapped policy."""
        return self.policy.encode(request)

    def decode(self, completion_ids: Sequence[int]) -> str | None:
        """Return sampled tokens as text."""
        return self.policy.decode(completion_ids)

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Return whether the model sees the tools of a request."""
        return self.policy.shows_tools(tools)


class _WrappedStream(GenerationStream):
    def __init__(self, wrapper: PolicyWrapper, stream: GenerationStream) -> None:
        super().__init__()
        self._wrapper, self._stream = wrapper, stream
        self._requests: dict[int, GenerationRequest] = {}  # the latest of each episode
        self._ready: dict[int, Generation | BaseException] = {}
        self.gathers = stream.gathers
        self.mark_idle = stream.mark_idle  # type: ignore[method-assign]
        self.close = stream.close  # type: ignore[method-assign]

    @property
    def has_requests(self) -> bool:
        return bool(self._ready) or self._stream.has_requests

    def add(self, key: int, request: GenerationRequest) -> None:
        self._requests[key] = request
        changed = _result_of(self._wrapper.before, request)
        if isinstance(changed, GenerationRequest):
            self._stream.add(key, changed)
        else:
            self._ready[key] = changed

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


def _result_of(function: Callable[..., Result], *arguments: Any) -> Result | Exception:
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - a wrapper is foreign code; it costs its episode
        return error
