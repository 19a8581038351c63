"""A client's session on one of several servers."""

import itertools
import json
import os
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.remote.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_REPLY_BYTES,
    TOKEN_VARIABLE,
    Refusal,
    write_message,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

OPEN_SECONDS: Final = 10.0
"""Time limit for a server to open a session and to describe its environment."""
PAUSE_SECONDS: Final = 0.2
_num_opened = itertools.count()


class SessionLost(ConnectionError):
    """The connection of a session ended, and with it the session."""


class Client:
    """One session on one of several servers of the same environment."""

    def __init__(
        self, urls: str | Sequence[str], *, connect_timeout: float, timeout: float
    ) -> None:
        """Open a session; check that the servers that answer serve the same."""
        self._servers = [_parse(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._servers:
            raise ConfigurationError("url: name at least one server, http://host:8000.")
        self.connect_timeout, self.timeout = connect_timeout, timeout
        self.description: dict[str, Any] = {}
        self.is_current = False
        """Whether the session is in the state of the client's episode; set by its owner."""
        self._connection: ClientConnection | None = None
        self._process = os.getpid()
        for server in self._servers if len(self._servers) > 1 else ():
            try:
                self._open_on(*server)
            except OSError:
                continue  # compared when it is used
            self.close()
        self.open()

    def open(self) -> None:
        """Open a session, unless this process has one; the servers take turns."""
        if self._connection is not None and self._process == os.getpid():
            return
        self.close()
        deadline, num_servers = time.monotonic() + self.connect_timeout, len(self._servers)
        first = os.getpid() + next(_num_opened)  # processes begin at different servers
        for number in itertools.count(first):
            try:
                return self._open_on(*self._servers[number % num_servers])
            except OSError as error:
                if number - first >= num_servers - 1 and time.monotonic() > deadline:
                    raise ServerError(
                        f"No server accepted the session within {self.connect_timeout:g} seconds: "
                        f"{error}. Start one with python -m agent_envs serve ID, or raise "
                        "connect_timeout=."
                    ) from error
            time.sleep(PAUSE_SECONDS / num_servers)

    def request(self, kind: str, timeout: float | None = None, **data: Any) -> dict[str, Any]:
        """Send a message and return the data of the reply."""
        from websockets.exceptions import ConnectionClosed

        assert self._connection is not None  # noqa: S101 - open() was called
        text = write_message(kind, data)
        if len(text) > MAX_MESSAGE_BYTES:
            limit = f"the limit is {MAX_MESSAGE_BYTES:,}"
            raise ServerError(f"The {kind} message has {len(text):,} bytes; {limit}.")
        seconds = timeout or self.timeout
        try:
            self._connection.send(text)
            reply = json.loads(self._connection.recv(timeout=seconds))
            answer: dict[str, Any] = reply["data"]
            if reply["type"] != "error":
                return answer
            refusal = Refusal(answer["code"], answer["message"], answer.get("kind"))
        except TimeoutError:
            self.close()
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None
        except (ConnectionClosed, OSError) as error:
            self.close()
            raise SessionLost(str(error)) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise ServerError("The server sent a malformed reply.") from error
        raise refusal

    def close(self) -> None:
        """End the session, unless it belongs to the process that this one was forked from."""
        connection, self._connection, self.is_current = self._connection, None, False
        if connection is not None and self._process == os.getpid():
            connection.close()

    def _open_on(self, url: str, headers: dict[str, str]) -> None:
        """Open a session on a server; raise an OSError if that fails."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        try:
            self._connection = connect(
                f"{url.replace('http', 'ws', 1)}/ws", additional_headers=headers,
                open_timeout=OPEN_SECONDS, close_timeout=1.0, max_size=MAX_REPLY_BYTES,
                compression=None, proxy=None,
            ).__enter__()  # fmt: skip
            self._process = os.getpid()
            description = self.request("describe", OPEN_SECONDS)
        except InvalidStatus as error:
            status = error.response.status_code
            if status == 401:
                text = f"{url} requires a token: set {TOKEN_VARIABLE} to that of the server."
                raise ConfigurationError(text) from None
            if status == 503:
                raise OSError(f"{url}: all its sessions are in use (--max_sessions)") from error
            raise OSError(f"{url}: {error}") from error
        except (WebSocketException, OSError, ServerError, Refusal) as error:
            self.close()
            raise OSError(f"{url}: {error}") from error
        self.description = self.description or description
        if description.get("fingerprint") != self.description.get("fingerprint"):
            self.close()
            raise ConfigurationError(
                f"url: {url} serves another environment, or other arguments, than the other "
                "servers. Start all servers of one list with the same arguments."
            )


def _parse(url: str) -> tuple[str, dict[str, str]]:
    """Return a server's URL and the headers for it: a token of the URL, or of the environment."""
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"url: {url!r} is not the URL of a server: http://host:8000.")
    headers = {}
    if parts.password is not None:
        pair = f"{parts.username or ''}:{unquote(parts.password)}"
        headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    elif token := os.environ.get(TOKEN_VARIABLE):
        headers["Authorization"] = f"Bearer {token}"
    place = parts.netloc.rpartition("@")[2] + parts.path.rstrip("/")
    return f"{parts.scheme}://{place}", headers
