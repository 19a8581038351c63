"""HTTP servers of this project: their limits, which hosts they answer, and what they log.

Each open connection costs the process a file descriptor. Beyond a limit, the owner of the most
connections loses the one that has been idle for longest. A connection belongs to the owner whose
key it sent last; all that sent none count together as one owner's. So a client that opens
connections beyond its share closes its own, and a client that sends its key at once is not kept out
by others that only connect.
"""

import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
_MAX_CONNECTIONS: Final = 4096
_KEEP_ALIVE_SECONDS: Final = 60
_SHUTDOWN_SECONDS: Final = 2
# Malformed requests are errors of the client, which gets a 400; uvicorn logs a warning for each.
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)
_REFUSALS: Final = ("without completing handshake", "Invalid UTF-8 sequence")


def listen(
    app: "ASGIApp",
    host: str,
    port: int = 0,
    *,
    local_only: bool = False,
    max_connections: int | None = None,
    **options: Any,
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Listen at an address; ``run(sockets=[socket])`` of the returned server then serves.

    Args:
        app: The application.
        host: Name or address of this machine.
        port: Its port; 0 for a free one.
        local_only: Whether requests for the names of other machines are refused. Without it, a web
            page whose name resolves to this machine could read a server without a key.
        max_connections: Open connections; None for `default_limit`.
        options: Further options of ``uvicorn.Config``.

    Returns:
        The server, its socket, and its URL.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_no_refusal)  # once, however often
    if local_only:
        app = TrustedHostMiddleware(app, [*LOCAL_HOSTS, host], www_redirect=False)
    limits = {"max_open": max_connections or default_limit(), "all_open": {}}
    # asyncio accepts all waiting connections at once, before an evicted one is closed
    backlog = default_limit() // 8
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        backlog=backlog,
        http=type("Protocol", (LimitedProtocol,), limits),
        lifespan="off",
        log_config=None,
        log_level=None,  # would change the loggers of the process
        proxy_headers=False,  # clients must not choose their address
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        **options,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=backlog)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return uvicorn.Server(config), listening, url


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's errors about refused WebSockets and malformed messages."""
    return not any(text in str(record.msg) for text in _REFUSALS)


def default_limit() -> int:
    """Return how many connections may be open: half of the process's file descriptors."""
    try:
        import resource
    except ImportError:  # on Windows
        return _MAX_CONNECTIONS
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
    owner = ""
    is_busy = False

    def connection_made(self, transport: Any) -> None:
        """Close another connection beyond the limit."""
        super().connection_made(transport)
        self.logger = _log
        self.app_state = {"connection": self}
        self.all_open[self] = None
        if len(self.all_open) > self.max_open:
            held = Counter(each.owner for each in self.all_open)
            most = max(held.values())
            largest = [each for each in self.all_open if held[each.owner] == most]
            evicted = min(largest, key=lambda each: each.is_busy)  # the first idle one
            del self.all_open[evicted]
            evicted.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.all_open.pop(self, None)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Hand the connection over."""
        self.all_open.pop(self, None)  # the application limits its sessions
        super().handle_websocket_upgrade(event)

    @contextmanager
    def in_use(self, owner: str) -> Iterator[None]:
        """Mark this connection, which sent the key of `owner`, as busy."""
        self.owner = owner
        self._mark(is_busy=True)
        try:
            yield
        finally:
            self._mark(is_busy=False)

    def _mark(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        if self in self.all_open:  # else it was closed
            self.all_open[self] = self.all_open.pop(self)
