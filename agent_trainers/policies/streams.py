"""Streams: how a policy serves many episodes that do not wait for each other.

A state goes in when its episode is there; actions come out as they are ready, in any order. What
lies between is the policy's business: one batch after the other, a batch that members join and
leave, or a server.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from agent_envs.core.async_bridge import CallSession
from agent_trainers.policies.generation import Generation, GenerationRequest

POLL_SECONDS: Final = 0.01
Generate = Callable[[Sequence[GenerationRequest]], list[Generation]]
StreamedResult = tuple[int, Generation | BaseException]
"""Whose action it is, and the action or what failed."""


class GenerationStream(ABC):
    """Generation for the episodes of one rollout."""

    gathers = False
    """Whether it pays to wait a moment for more states before the next `advance`."""

    def __init__(self) -> None:
        """Wait for requests."""
        self._waiting: dict[int, GenerationRequest] = {}

    @property
    def has_requests(self) -> bool:
        """Whether actions are wanted."""
        return bool(self._waiting)

    def add(self, key: int, request: GenerationRequest) -> None:
        """Ask for an action of episode `key`; it has none under way."""
        self._waiting[key] = request

    @abstractmethod
    def advance(self) -> list[StreamedResult]:
        """Work for a while; return the actions that are ready, or what failed."""

    def drop(self, key: int) -> None:
        """Forget episode `key`, which is over, and what it asked for."""
        self._waiting.pop(key, None)

    def rest(self, key: int) -> None:  # noqa: B027 - most keep nothing
        """Let others have what is kept for episode `key`: it may not come back for long."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what is held; nothing is asked any more."""


class WaveStream(GenerationStream):
    """All that is asked for at a time is generated as one batch."""

    gathers = True

    def __init__(self, generate: Generate) -> None:
        """Ask `generate`."""
        super().__init__()
        self._generate = generate

    def advance(self) -> list[StreamedResult]:
        """Return an action for each episode that asked; asks the policy also for none at all."""
        keys = sorted(self._waiting)
        requests = [self._waiting.pop(key) for key in keys]
        return list(zip(keys, self._generate(requests), strict=True))


class ConcurrentStream(GenerationStream):
    """Each state is asked for by itself, many side by side: for policies that are servers."""

    def __init__(self, generate: Generate, max_concurrency: int) -> None:
        """Ask `generate`, in up to `max_concurrency` threads at once."""
        super().__init__()
        self._generate = generate
        self._max_concurrency = max_concurrency
        self._session = CallSession()

    @property
    def has_requests(self) -> bool:
        """Whether actions are wanted."""
        return bool(self._waiting) or len(self._session) > 0

    def advance(self) -> list[StreamedResult]:
        """Send what may be sent; return what has come back, and wait a moment for it."""
        while self._waiting and len(self._session) < self._max_concurrency:
            key = next(iter(self._waiting))
            request = self._waiting.pop(key)
            self._session.submit(key, functools.partial(self._generate, [request]))
        return [
            (outcome.key, outcome.error or outcome.value[0])
            for outcome in self._session.wait(POLL_SECONDS)
        ]

    def drop(self, key: int) -> None:
        """Forget what episode `key` asked for; a call under way is left to itself."""
        super().drop(key)
        self._session.abandon(key)
