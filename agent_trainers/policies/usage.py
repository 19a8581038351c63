"""What an episode asks of a model: calls and tokens, of a served model or a local one."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent_envs.core.messages import Message
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, Usage
from agent_trainers.policies.streams import GenerationStream, open_stream


class MeteredPolicy:
    """Counts what each episode asks of another policy; safe to call from many threads."""

    def __init__(self, policy: Policy) -> None:
        """Count for `policy`, which acts as if it were alone."""
        self._policy = policy
        self._lock = threading.Lock()
        # By the episode's own generator, which is what tells episodes apart here.
        self._by_episode: dict[np.random.Generator, Usage] = {}

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""
        generations = self._policy.generate(requests)
        for request, generation in zip(requests, generations, strict=True):
            self.note(request.rng, generation)
        return generations

    def open_stream(self) -> GenerationStream:
        """Serve many episodes at once, as the policy does."""
        return _MeteredStream(open_stream(self._policy), self)

    def note(self, rng: np.random.Generator, generation: Generation) -> None:
        """Add one generation to what the episode with this generator has asked for."""
        with self._lock:
            self._by_episode[rng] = self._by_episode.get(rng, Usage()) + usage_of(generation)

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state."""
        return self._policy.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state; None where it does not fit."""
        return self._policy.encode(request)

    def usage(self, rng: np.random.Generator) -> Usage:
        """Return what the episode with this generator has asked for so far."""
        return self._by_episode.get(rng, Usage())

    @property
    def is_concurrent(self) -> bool:
        """Whether it may be called from many threads: as the policy says."""
        return bool(getattr(self._policy, "is_concurrent", False))

    @property
    def max_concurrency(self) -> int:
        """How many calls at once: as the policy says."""
        return int(getattr(self._policy, "max_concurrency", 1))


class _MeteredStream:
    """Counts what comes out of another stream."""

    def __init__(self, stream: GenerationStream, meter: MeteredPolicy) -> None:
        self._stream, self._meter = stream, meter
        self._rngs: dict[int, np.random.Generator] = {}
        self.gathers = stream.gathers

    @property
    def has_requests(self) -> bool:
        return self._stream.has_requests

    def add(self, key: int, request: GenerationRequest) -> None:
        self._rngs[key] = request.rng
        self._stream.add(key, request)

    def advance(self) -> list[tuple[int, Generation | BaseException]]:
        ready = self._stream.advance()
        for key, generation in ready:
            if not isinstance(generation, BaseException):
                self._meter.note(self._rngs[key], generation)
        return ready

    def drop(self, key: int) -> None:
        self._stream.drop(key)

    def close(self) -> None:
        self._stream.close()


def usage_of(generation: Generation) -> Usage:
    """Return what one generation took: as a server counted it, else by the tokens themselves."""
    if generation.usage is not None:
        return generation.usage
    if generation.finish_reason == "overflow":
        return Usage()
    return Usage(
        calls=1,
        prompt_tokens=len(generation.prompt_ids),
        completion_tokens=len(generation.completion_ids),
    )
