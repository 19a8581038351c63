"""A limit of the gateway's open connections, each of which costs the process a file descriptor.

Beyond the limit, the session with the most connections loses the one that has been idle for
longest. A connection belongs to the session whose key it sent last; all that sent none count
together as one session's. So a program that opens connections beyond its share closes its own, and
a client that sends its key at once is not kept out by others that only connect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agent_envs.errors import ConfigurationError

Address = tuple[str, int]
_NO_SESSION: Final = ""
_MAX_CONNECTIONS: Final = 4096


class Transport(Protocol):
    """A connection that can be closed."""

    def abort(self) -> None:
        """Close it at once."""


@dataclass(slots=True)
class _Connection:
    transport: Transport
    is_busy: bool = False


class ConnectionLimit:
    """The open connections by session and client address. Used by the server's thread only."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` connections."""
        if limit < 1:
            raise ConfigurationError(f"max_connections ({limit}) must be positive.")
        self._limit = limit
        self._session_of: dict[Address, str] = {}
        self._held: dict[str, dict[Address, _Connection]] = {}  # least recently used first

    def add(self, client: Address, transport: Transport) -> None:
        """Add a new connection; close another one beyond the limit."""
        self._put(_NO_SESSION, client, _Connection(transport))
        if len(self._session_of) > self._limit:
            largest = max(
                self._held.values(), key=lambda held: (len(held), _idle(held) is not None)
            )
            self._take(_idle(largest) or next(iter(largest))).transport.abort()

    def remove(self, client: Address, transport: Transport) -> None:
        """Remove a closed connection, unless its address belongs to a new one by now."""
        session = self._session_of.get(client)
        if session is not None and self._held[session][client].transport is transport:
            self._take(client)

    @contextmanager
    def in_use(self, client: Address | None, session_id: str) -> Iterator[None]:
        """Mark a connection that sent a session's key as busy."""
        self._move(client, session_id, is_busy=True)
        try:
            yield
        finally:
            self._move(client, session_id, is_busy=False)

    def _move(self, client: Address | None, session_id: str, *, is_busy: bool) -> None:
        if client in self._session_of:  # else it was closed meanwhile
            connection = self._take(client)
            connection.is_busy = is_busy
            self._put(session_id, client, connection)

    def _put(self, session_id: str, client: Address, connection: _Connection) -> None:
        self._session_of[client] = session_id
        self._held.setdefault(session_id, {})[client] = connection

    def _take(self, client: Address) -> _Connection:
        session_id = self._session_of.pop(client)
        held = self._held[session_id]
        connection = held.pop(client)
        if not held:
            del self._held[session_id]
        return connection


def _idle(held: dict[Address, _Connection]) -> Address | None:
    return next((client for client, connection in held.items() if not connection.is_busy), None)


def default_limits() -> tuple[int, int]:
    """Return how many connections may be open, and how many may wait to be accepted.

    These are half and a sixteenth of the process's file descriptors: asyncio accepts all waiting
    connections at once, up to four times before an evicted one is closed.
    """
    num_files = 4 * _MAX_CONNECTIONS  # Windows limits sockets by memory only
    try:
        import resource
    except ImportError:
        pass
    else:
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_files = num_files if soft_limit == resource.RLIM_INFINITY else soft_limit
    return min(num_files // 2, _MAX_CONNECTIONS), min(num_files // 16, _MAX_CONNECTIONS // 2)


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
