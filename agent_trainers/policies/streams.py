"""Generation for many independent episodes: requests go in, actions come out in any order."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from agent_envs.core.async_bridge import CallSession
from agent_trainers.policies.generation import Generation, GenerationRequest

POLL_SECONDS: Final = 0.01
Generate = Callable[[Sequence[GenerationRequest]], list[Generation]]
StreamedResult = tuple[int, Generation | BaseException]
"""Key of the episode, and its action or the error."""


class GenerationStream(ABC):
    """Generation for the episodes of one rollout."""

    gathers = False
    """Whether waiting a moment for more requests before the next `advance` pays."""

    def __init__(self) -> None:
        """Start without requests."""
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

    def close(self) -> None:  # noqa: B027 - most streams hold nothing
        """Release all resources."""


class WaveStream(GenerationStream):
    """Generation of all pending requests as one batch."""

    gathers = True

    def __init__(self, generate: Generate) -> None:
        """Use `generate` for each batch."""
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
        """Call `generate` in up to `max_concurrency` threads."""
        super().__init__()
        self._generate = generate
        self._max_concurrency = max_concurrency
        self._session = CallSession()

    @property
    def has_requests(self) -> bool:
        """Whether any request is pending or running."""
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
        """Remove episode `key`; a running call is abandoned."""
        super().drop(key)
        self._session.abandon(key)
