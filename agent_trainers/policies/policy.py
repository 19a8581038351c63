"""Policies: states in, model turns out; base classes, scripted policies, wrappers and streams."""

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from agent_envs.core.async_bridge import CallSession
from agent_envs.core.contexts import estimate_tokens
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_trainers.trajectory import Transition

FinishReason = Literal["stop", "length", "overflow"]
Schemas = Sequence[dict[str, Any]] | None
POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A state that needs an action."""

    episode_id: int
    """Index of the episode's spec in the call of `Rollout.collect`."""
    messages: Sequence[Message]
    """Messages of the state."""
    tools: Schemas
    """Function schemas for the chat template; None if the state describes the tools."""
    previous: Transition | None
    """Previous step of the episode, whose tokens are the prefix of a state that extends it."""
    rng: np.random.Generator
    """The episode's own generator, the source of all sampling."""
    is_over: Callable[[Sequence[int]], bool] | None = None
    """Whether the turn ends after the tokens sampled so far, in addition to the policy's own ends.
    A policy may ignore it; the caller truncates the turn."""
    prompt_ids: list[int] | None = None
    """Tokens of the state by `Policy.encode`; None to encode it when it is sampled."""
    guide: Mapping[str, Any] | None = None
    """Structural tag (of xgrammar and vLLM) that the turn follows, checked by
    `Policy.check_guide`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of model turns, tokens of their states, and sampled tokens."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One model turn; only `text` if the policy has no tokens."""

    text: str
    """The action: the sampled tokens as text, without special tokens."""
    prompt_ids: list[int] = field(default_factory=list)
    """Tokens of the state."""
    completion_ids: list[int] = field(default_factory=list)
    """Sampled tokens, including the end-of-turn token."""
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-probability of each token when it was sampled, shape (len(completion_ids),)."""
    finish_reason: FinishReason = "stop"
    """``stop``: the model ended its turn; ``length``: the turn was truncated; ``overflow``: the
    state does not fit the context, and nothing was sampled."""
    usage: Usage | None = None
    """Usage counted by a server; None to count the tokens above."""
    policy_version: int | None = None
    """Version of the weights when the turn began, of a `VersionedPolicy`."""

    @property
    def spent(self) -> Usage:
        if self.usage is not None:
            return self.usage
        if self.finish_reason == "overflow":
            return Usage()
        num_prompt, num_completion = len(self.prompt_ids), len(self.completion_ids)
        return Usage(calls=1, prompt_tokens=num_prompt, completion_tokens=num_completion)


Generate = Callable[[Sequence[GenerationRequest]], list[Generation]]
StreamedResult = tuple[int, Generation | BaseException]
"""Key of the episode, and its action or the error."""


class GenerationStream(ABC):
    """Generation for many independent episodes: requests go in, actions come in any order."""

    gathers = False
    """Whether waiting a moment for more requests before the next `advance` pays."""

    def __init__(self) -> None:
        self._waiting: dict[int, GenerationRequest] = {}

    @property
    def has_requests(self) -> bool:
        """Whether any request is pending or running."""
        return bool(self._waiting)

    def add(self, key: int, request: GenerationRequest) -> None:
        """Add the request of episode `key`, which has no other one."""
        self._waiting[key] = request

    @abstractmethod
    def advance(self) -> list[StreamedResult]:
        """Generate for a while; return the finished actions and errors."""

    def drop(self, key: int) -> None:
        """Remove an episode that is over, and its request."""
        self._waiting.pop(key, None)

    def mark_idle(self, key: int) -> None:  # noqa: B027 - most streams keep nothing
        """Allow the resources of episode `key` to be reclaimed until its next request."""

    def refresh(self) -> None:  # noqa: B027 - most streams keep nothing
        """Recompute what was computed with earlier weights of the policy."""

    def close(self) -> None:  # noqa: B027 - most streams hold nothing
        """Release all resources."""


class WaveStream(GenerationStream):
    """Generation of all pending requests as one batch."""

    gathers = True

    def __init__(self, generate: Generate) -> None:
        super().__init__()
        self._generate = generate

    def advance(self) -> list[StreamedResult]:
        """Return an action per request; calls the policy even without requests."""
        keys = sorted(self._waiting)
        requests = [self._waiting.pop(key) for key in keys]
        return list(zip(keys, self._generate(requests), strict=True))


class ConcurrentStream(GenerationStream):
    """Concurrent generation of single requests, for policies that are servers."""

    def __init__(self, generate: Generate, max_concurrency: int) -> None:
        super().__init__()
        if max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency must be at least 1, not {max_concurrency}.")
        self._generate, self._max_concurrency = generate, max_concurrency
        self._session = CallSession()

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting) or len(self._session) > 0

    def advance(self) -> list[StreamedResult]:
        """Submit pending requests; return finished ones, waiting a moment for the first."""
        while self._waiting and len(self._session) < self._max_concurrency:
            key = next(iter(self._waiting))
            request = self._waiting.pop(key)
            self._session.submit(key, functools.partial(self._generate, [request]))
        return [
            (outcome.key, outcome.error or outcome.value[0])
            for outcome in self._session.wait(POLL_SECONDS)
        ]

    def drop(self, key: int) -> None:
        super().drop(key)
        self._session.abandon(key)


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

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        """Count the tokens of a state; by default an estimate."""
        return estimate_tokens(messages)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state: empty if only a server knows them, None if too long.

        Several threads may call it at once.
        """
        return []

    def check_guide(self, guide: Mapping[str, Any]) -> None:
        """Raise a `ConfigurationError` if the policy cannot follow a structural tag."""
        raise ConfigurationError("the policy does not support guided decoding.")

    def decode(self, completion_ids: Sequence[int]) -> str | None:
        """Return sampled tokens as text; None if only a server knows the tokens."""
        return None

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Return whether the model sees the tools of a request."""
        return True


class ScriptedPolicy(Policy):
    """A function of the request. Tokens are the UTF-8 bytes of the text."""

    def __init__(self, act: Callable[[GenerationRequest], str]) -> None:
        self._act = act

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._generation(request) for request in requests]

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        return sum(len(_bytes(message["content"])) for message in messages)

    def encode(self, request: GenerationRequest) -> list[int]:
        return [token for message in request.messages for token in _bytes(message["content"])]

    def decode(self, completion_ids: Sequence[int]) -> str:
        return bytes(completion_ids).decode("utf-8", "replace")

    def _generation(self, request: GenerationRequest) -> Generation:
        ids = _bytes(text := self._act(request))
        return Generation(
            text=text,
            prompt_ids=self.encode(request),
            completion_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
        )


class PolicyWrapper(Policy):
    """A policy around another one.

    Override `before` to change requests, `after` to change generations.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.max_concurrency = policy.max_concurrency
        self.sampling = policy.sampling

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Return the request for the policy, or an action that replaces its own."""
        return request

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Return the action for the policy's generation; `request` is that before `before`."""
        return generation

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        changed = [self.before(request) for request in requests]
        replies = iter(
            self.policy.generate([each for each in changed if isinstance(each, GenerationRequest)])
        )
        return [
            each if isinstance(each, Generation) else self.after(request, next(replies))
            for request, each in zip(requests, changed, strict=True)
        ]

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        return self.policy.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        return self.policy.encode(request)

    def check_guide(self, guide: Mapping[str, Any]) -> None:
        self.policy.check_guide(guide)

    def decode(self, completion_ids: Sequence[int]) -> str | None:
        return self.policy.decode(completion_ids)

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        return self.policy.shows_tools(tools)


class VersionedPolicy(PolicyWrapper):
    """A policy whose weights change between forward passes, never during one.

    A turn that is unfinished at a change continues with the new weights. Its version is that of its
    beginning; its log-probabilities are those with which each token was sampled.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.lock = threading.Lock()
        self.version = 0

    @contextlib.contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Stop all forward passes while the block changes the weights."""
        with self.lock:
            yield
            self.version = version

    def open_stream(self) -> GenerationStream:
        return _VersionedStream(self)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        with self.lock:
            made = super().generate(requests)
            return [replace(generation, policy_version=self.version) for generation in made]


class _VersionedStream(GenerationStream):
    def __init__(self, policy: VersionedPolicy) -> None:
        super().__init__()
        self._policy, self._stream = policy, policy.policy.open_stream()
        self.gathers, self._version = self._stream.gathers, policy.version
        self._begun: dict[int, int] = {}  # version by key

    @property
    def has_requests(self) -> bool:
        return self._stream.has_requests

    def add(self, key: int, request: GenerationRequest) -> None:
        self._begun[key] = self._policy.version
        self._stream.add(key, request)

    def advance(self) -> list[StreamedResult]:
        with self._policy.lock:
            if self._version != self._policy.version:
                self._version = self._policy.version
                self._stream.refresh()
            ready = self._stream.advance()
        return [
            (key, replace(result, policy_version=self._begun[key]))
            if isinstance(result, Generation)
            else (key, result)
            for key, result in ready
        ]

    def drop(self, key: int) -> None:
        self._begun.pop(key, None)
        self._stream.drop(key)

    def mark_idle(self, key: int) -> None:
        self._stream.mark_idle(key)

    def close(self) -> None:
        self._stream.close()


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))
