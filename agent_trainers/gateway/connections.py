"""A limit of the gateway's open connections, each of which costs the process a file descriptor.

Beyond the limit, the session with the most connections loses the one that has been idle for
longest. A connection belongs to the session whose key it sent last; all that sent none count
together as one session's. So a program that opens connections beyond its share closes its own, and
a client that sends its key at once is not kept out by others that only connect.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.errors import ConfigurationError

Address = tuple[str, int]
_MAX_CONNECTIONS: Final = 4096


@dataclass(slots=True)
class _Connection:
    transport: Any
    session_id: str = ""
    is_busy: bool = False


class ConnectionLimit:
    """The open connections by client address. Used by the server's thread only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigurationError(f"max_connections ({limit}) must be positive.")
        self.limit = limit
        self._open: dict[Address, _Connection] = {}  # least recently used first

    def add(self, client: Address, transport: Any) -> None:
        """Add a new connection; close another one beyond the limit."""
        self._open[client] = _Connection(transport)
        if len(self._open) > self.limit:
            held = Counter(connection.session_id for connection in self._open.values())
            most = max(held.values())
            largest = [c for c, each in self._open.items() if held[each.session_id] == most]
            evicted = min(largest, key=lambda c: self._open[c].is_busy)  # the first idle one
            self._open.pop(evicted).transport.abort()

    def remove(self, client: Address, transport: Any) -> None:
        """Remove a closed connection, unless its address belongs to a new one by now."""
        if client in self._open and self._open[client].transport is transport:
            del self._open[client]

    @contextmanager
    def in_use(self, client: Address, session_id: str) -> Iterator[None]:
        """Mark a connection that sent a session's key as busy."""
        self._mark(client, session_id, is_busy=True)
        try:
            yield
        finally:
            self._mark(client, session_id, is_busy=False)

    def _mark(self, client: Address, session_id: str, *, is_busy: bool) -> None:
        if (connection := self._open.pop(client, None)) is not None:  # else it was closed
            connection.session_id, connection.is_busy = session_id, is_busy
            self._open[client] = connection


def default_limit() -> int:
    """Return how many connections may be open: half of the process's file descriptors."""
    try:
        import resource
    except ImportError:  # Windows limits sockets by memory only
        return _MAX_CONNECTIONS
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = soft_limit == resource.RLIM_INFINITY
    return _MAX_CONNECTIONS if unlimited else min(soft_limit // 2, _MAX_CONNECTIONS)


def limited_protocol(connections: ConnectionLimit) -> Any:
    """Return uvicorn's h11 protocol, which bounds request heads, with a limit of connections."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class LimitedProtocol(H11Protocol):
        # Relies on `client`, which uvicorn sets and passes to the application in its scope.

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if self.client is not None:  # None: already closed
                connections.add(self.client, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.client is not None:
                connections.remove(self.client, self.transport)
            super().connection_lost(exc)

    return LimitedProtocol
