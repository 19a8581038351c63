"""A client's session on the least loaded of several servers."""

import functools
import json
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.remote.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_REPLY_BYTES,
    TOKEN_VARIABLE,
    Refusal,
    numpy_as_json,
)

if TYPE_CHECKING:
    import httpx
    from websockets.sync.client import ClientConnection

T = TypeVar("T")
PROBE_SECONDS: Final = 10.0
"""Time limit for a server to report its load, and to open a session."""
AVOID_SECONDS: Final = 10.0
"""How long a server that did not answer is skipped while others do."""
MAX_PAUSE_SECONDS: Final = 1.0

# Clients of one process choose servers one after the other, so that each sees the others' choices.
_choosing = threading.Lock()
_avoided_until: dict[str, float] = {}


def _reset_lock() -> None:
    global _choosing
    _choosing = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may have held it
    os.register_at_fork(after_in_child=_reset_lock)


class SessionLost(ConnectionError):
    """The connection of a session ended, and with it the session."""


class AtCapacity(OSError):
    """All servers that answer have as many sessions as they allow."""


@functools.cache
def _http() -> "httpx.Client":
    import httpx

    # Without kept connections, which a forked process would share.
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Server:
    """The address of a server."""

    def __init__(self, url: str) -> None:
        """Parse a URL, ``http://host:8000``; with ``https`` for a proxy with TLS.

        It may contain a token as a password, ``http://:TOKEN@host:8000``, instead of the
        environment variable.
        """
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname or port == 0:
            raise ConfigurationError(f"url: {url!r} is not the URL of a server: http://host:8000.")
        self._secure = "s" if parts.scheme in ("https", "wss") else ""
        self._place = parts.netloc.rpartition("@")[2] + parts.path.rstrip("/")
        self.headers: dict[str, str] = {}
        if parts.password is not None:
            pair = f"{parts.username or ''}:{unquote(parts.password)}"
            self.headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        elif token := os.environ.get(TOKEN_VARIABLE):
            self.headers["Authorization"] = f"Bearer {token}"

    def __str__(self) -> str:
        """Return the URL without a token."""
        return f"http{self._secure}://{self._place}"

    def get(self, route: str) -> dict[str, Any]:
        """Return the JSON object at a route."""
        import httpx

        deadline, body = time.monotonic() + PROBE_SECONDS, bytearray()
        request = _http().stream(
            "GET", f"{self}{route}", headers=self.headers, timeout=PROBE_SECONDS
        )
        try:
            with request as response:
                for piece in response.iter_bytes():
                    body += piece
                    if time.monotonic() > deadline or len(body) > MAX_REPLY_BYTES:
                        raise OSError(f"its answer does not end ({len(body):,} bytes so far)")
            answer = json.loads(body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        except ValueError:
            answer = None
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ConfigurationError(
                f"{self} requires a token: set {TOKEN_VARIABLE} to the one it was started with."
            )
        if not isinstance(answer, dict) or "fingerprint" not in answer:
            raise OSError(f"not an agent_envs server (status {response.status_code} at {route})")
        return answer

    def connect(self) -> "ClientConnection":
        """Open a connection, which is a session."""
        from websockets.sync.client import connect

        return connect(
            f"ws{self._secure}://{self._place}/ws", additional_headers=self.headers,
            open_timeout=PROBE_SECONDS, close_timeout=1.0, max_size=MAX_REPLY_BYTES,
            compression=None, proxy=None,
        )  # fmt: skip


class Client:
    """One session on one of several servers of the same environment."""

    def __init__(
        self, urls: str | Sequence[str], *, connect_timeout: float, timeout: float
    ) -> None:
        """Check that the servers that answer serve the same."""
        self.servers = [Server(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.servers:
            raise ConfigurationError("url: name at least one server, http://host:8000.")
        self.connect_timeout, self.timeout = connect_timeout, timeout
        self.is_current = False
        """Whether the session is in the state of the client's episode; set by its owner."""
        self.num_opened = 0
        """Number of sessions so far."""
        self._connection: ClientConnection | None = None
        self._closing = ExitStack()
        self._server = self.servers[0]
        self._process = os.getpid()
        answers = self._retry(lambda: self._get_all("/describe"))
        self._server, self.description = answers[0]
        for server, answer in answers[1:]:
            self._check_same(server, answer)

    def open(self) -> None:
        """Open a session on the server with the fewest, unless one is open in this process."""
        if self._connection is None or self._process != os.getpid():
            self.close()
            self._retry(self._connect)
            self.num_opened += 1

    def request(self, kind: str, timeout: float | None = None, **data: Any) -> dict[str, Any]:
        """Send a message and return the data of the reply."""
        from websockets.exceptions import ConnectionClosed

        assert self._connection is not None  # noqa: S101 - open() was called
        text = json.dumps({"type": kind, "data": data}, default=numpy_as_json)
        if len(text) > MAX_MESSAGE_BYTES:
            limit = f"the limit is {MAX_MESSAGE_BYTES:,}"
            raise ServerError(f"The {kind} message has {len(text):,} bytes; {limit}.")
        seconds = timeout or self.timeout
        try:
            self._connection.send(text)
            text = str(self._connection.recv(timeout=seconds))
        except TimeoutError:
            self.close()
            raise TimeoutError(f"{self._server}: no answer within {seconds:g} seconds") from None
        except (ConnectionClosed, OSError) as error:
            self.close()
            raise SessionLost(f"{self._server}: {error}") from error
        try:
            reply = json.loads(text)
            answer: dict[str, Any] = reply["data"]
            if reply["type"] == "error":
                raise Refusal(answer["code"], answer["message"], answer.get("kind"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise ServerError(f"{self._server} sent a malformed reply.") from error
        return answer

    def close(self) -> None:
        """End the session."""
        self._connection, self.is_current = None, False
        if self._process == os.getpid():
            self._closing.close()

    def _get_all(self, route: str, errors: list[str] | None = None) -> "list[tuple[Server, Any]]":
        """Return the answer of each server that gives one; append the reasons of the others."""
        errors = [] if errors is None else errors
        now = time.monotonic()
        usable = [s for s in self.servers if now >= _avoided_until.get(str(s), 0.0)]
        answers = []
        for server in usable or self.servers:
            try:
                answers.append((server, server.get(route)))
            except OSError as error:
                _avoided_until[str(server)] = time.monotonic() + AVOID_SECONDS
                errors.append(f"{server}: {error}")
        if not answers:
            raise OSError("; ".join(errors))
        return answers

    def _check_same(self, server: Server, answer: Mapping[str, Any]) -> None:
        if answer["fingerprint"] != self.description["fingerprint"]:
            raise ConfigurationError(
                f"url: {server} serves another environment, or other arguments, than "
                f"{self._server}, which serves {self.description['environment']}. Start all "
                "servers of one list with the same arguments."
            )

    def _connect(self) -> None:
        """Connect to the server with the fewest sessions."""
        errors: list[str] = []
        with _choosing:
            answers = self._get_all("/capacity", errors)
            for server, answer in answers:
                self._check_same(server, answer)
            free = [a for a in answers if a[1]["active_sessions"] < a[1]["max_sessions"]]
            if not free:
                raise AtCapacity("all servers are at capacity")
            for server, _ in sorted(free, key=lambda answer: int(answer[1]["open_sessions"])):
                try:
                    return self._open_session(server)
                except (OSError, Refusal) as error:
                    errors.append(f"{server}: {error}")
        raise OSError("; ".join(errors))

    def _open_session(self, server: Server) -> None:
        from websockets.exceptions import WebSocketException

        self._closing, self._process, self._server = ExitStack(), os.getpid(), server
        try:
            self._connection = self._closing.enter_context(server.connect())
            self.request("state", PROBE_SECONDS)  # a full server refuses the first message
        except (WebSocketException, ServerError) as error:
            self.close()
            raise OSError(str(error)) from error
        except Refusal:
            self.close()
            raise

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt` once it does not fail."""
        started, pause = time.monotonic(), 0.05
        while True:
            try:
                return attempt()
            except OSError as error:
                name = "timeout" if isinstance(error, AtCapacity) else "connect_timeout"
                limit: float = getattr(self, name)
                if time.monotonic() + pause > started + limit:
                    raise ServerError(
                        f"No server accepted the session within {limit:g} seconds: {error}. Start "
                        f"one with python -m agent_envs serve ID, or raise {name}=."
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
