"""The connections of the gateway's clients: how many there may be, and who has to give one up.

Each costs the process a file, and a program that opens connections and leaves them would take them
all. So there is a limit for all together; beyond it, whoever holds most loses the connection that
has been of no use for longest. A session holds those on which its key was last shown; all others
together count as one holder's. So a program takes from itself what it opens beyond its share, and a
client that shows its key at once cannot be kept out by others that wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agent_envs.errors import ConfigurationError

Address = tuple[str, int]
_STRANGERS: Final = ""
"""The holder of connections on which no key was shown yet."""
_MOST: Final = 4096


class Transport(Protocol):
    """What can be closed."""

    def abort(self) -> None:
        """Close it now, whatever is under way."""


@dataclass(slots=True)
class _Held:
    """The connections of one holder, each kind by when it was last used, oldest first."""

    idle: dict[Address, Transport] = field(default_factory=dict)
    busy: dict[Address, Transport] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class Connections:
    """Those that are open, by their clients' addresses. Used by the server's thread only."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` at once.

        Raises:
            ConfigurationError: If there may be none.
        """
        if limit < 1:
            raise ConfigurationError(f"max_connections ({limit}) must be positive.")
        self._limit = limit
        self._holders: dict[Address, str] = {}
        self._held: dict[str, _Held] = {}

    def add(self, client: Address, transport: Transport) -> None:
        """Note a new connection; another may have to go."""
        self._holders[client] = _STRANGERS
        self._held.setdefault(_STRANGERS, _Held()).idle[client] = transport
        if len(self._holders) > self._limit:
            most = max(self._held.values(), key=lambda held: (len(held), bool(held.idle)))
            oldest, useless = next(iter((most.idle or most.busy).items()))
            self.remove(oldest, useless)
            useless.abort()

    def remove(self, client: Address, transport: Transport) -> None:
        """Forget a connection that is closed, unless its address is another one's by now."""
        if (holder := self._holders.get(client)) is None:
            return
        held = self._held[holder]
        for connections in (held.idle, held.busy):
            if connections.get(client) is transport:
                del connections[client], self._holders[client]
        if not held:
            del self._held[holder]

    @contextmanager
    def in_use(self, client: Address | None, session_id: str) -> Iterator[None]:
        """Note that a session's key was shown on a connection, which is of use from now on."""
        self._move(client, session_id, is_busy=True)
        try:
            yield
        finally:
            self._move(client, session_id, is_busy=False)

    def _move(self, client: Address | None, holder: str, *, is_busy: bool) -> None:
        if client is None or (before := self._holders.get(client)) is None:  # it is closed
            return
        held = self._held[before]
        transport = held.idle.pop(client, None) or held.busy.pop(client)
        if not held:
            del self._held[before]
        self._holders[client] = holder
        held = self._held.setdefault(holder, _Held())
        (held.busy if is_busy else held.idle)[client] = transport


def default_limits() -> tuple[int, int]:
    """Return how many connections may be open, and how many may wait to be accepted.

    Half of the files that the process may open, and a sixteenth: asyncio accepts as many as wait
    at a time, and does so up to four times before a connection that has to go is closed.
    """
    try:
        import resource
    except ImportError:  # Windows bounds sockets by memory only
        num_files = 4 * _MOST
    else:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num_files == resource.RLIM_INFINITY:
            num_files = 4 * _MOST
    return min(num_files // 2, _MOST), min(num_files // 16, _MOST // 2)


def counted_protocol(connections: Connections) -> Any:
    """Return uvicorn's protocol with its connections noted.

    Of its two, the one on h11: it bounds what it keeps of a request's head.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class CountedProtocol(H11Protocol):
        """Relies on `client`, which uvicorn sets and gives to the application as its scope's."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if self.client is not None:  # None: it is closed already
                connections.add(self.client, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.client is not None:
                connections.remove(self.client, self.transport)
            super().connection_lost(exc)

    return CountedProtocol
