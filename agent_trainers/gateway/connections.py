"""A limit of the gateway's open connections, each of which costs the process a file descriptor.

Beyond the limit, the session with the most connections loses the one that has been idle for
longest. A connection belongs to the session whose key it sent last; all that sent none count
together as one session's. So a program that opens connections beyond its share closes its own, and
a client that sends its key at once is not kept out by others that only connect.
"""

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

_MAX_CONNECTIONS: Final = 4096


def default_limit() -> int:
    """Return how many connections may be open: half of the process's file descriptors."""
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = soft_limit == resource.RLIM_INFINITY
    return _MAX_CONNECTIONS if unlimited else min(soft_limit // 2, _MAX_CONNECTIONS)


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn's h11 server, which bounds request heads.

    Relies on uvicorn passing `app_state` to the application as ``request.state``.
    """

    max_open: int
    all_open: "dict[LimitedProtocol, None]"
    """The open ones of a server, least recently used first."""
    session_id = ""
    is_busy = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {"connection": self}
        self.all_open[self] = None
        if len(self.all_open) > self.max_open:
            held = Counter(each.session_id for each in self.all_open)
            most = max(held.values())
            largest = [each for each in self.all_open if held[each.session_id] == most]
            evicted = min(largest, key=lambda each: each.is_busy)  # the first idle one
            del self.all_open[evicted]
            evicted.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.all_open.pop(self, None)
        super().connection_lost(exc)

    @contextmanager
    def in_use(self, session_id: str) -> Iterator[None]:
        """Mark this connection, which sent a session's key, as busy."""
        self.session_id = session_id
        self._mark(is_busy=True)
        try:
            yield
        finally:
            self._mark(is_busy=False)

    def _mark(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        if self in self.all_open:  # else it was closed
            self.all_open[self] = self.all_open.pop(self)


def limited_protocol(limit: int) -> type[LimitedProtocol]:
    """Return the protocol of a server with at most `limit` open connections."""
    return type("Protocol", (LimitedProtocol,), {"max_open": limit, "all_open": {}})
