"""A client's way to one of several servers: the one with the fewest sessions."""

import http.client
import json
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.remote.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_REPLY_BYTES,
    TOKEN_VARIABLE,
    Refusal,
    plain,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

T = TypeVar("T")
LOOK_SECONDS: Final = 10.0
"""How long a server may take to say how many sessions it has, and to open one."""
AVOID_SECONDS: Final = 10.0
"""A server that was away is not asked again for so long while another is there."""
MAX_PAUSE_SECONDS: Final = 1.0
_PIECE_BYTES: Final = 2**16
_UNAUTHORIZED: Final = (401, 403)

# Clients of one process choose one after the other, so that each sees where the others went.
_choosing = threading.Lock()
_away_until: dict[str, float] = {}


def _forget_choices() -> None:
    global _choosing
    _choosing = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may have been choosing
    os.register_at_fork(after_in_child=_forget_choices)


class SessionLost(ConnectionError):
    """A connection ended, and with it the session on the server's side."""


class NoRoom(OSError):
    """Servers are there, and all their sessions are taken."""


class Address:
    """Where a server is."""

    def __init__(self, url: str) -> None:
        """Read a URL: ``http://host:8000``; with ``https`` for a proxy that has TLS.

        A token may stand in it as a password, ``http://:TOKEN@host:8000``; else that of the
        environment variable is sent.

        Raises:
            ConfigurationError: If it is no such URL.
        """
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname or port == 0:
            raise ConfigurationError(f"url: {url!r} is no URL of a server: http://host:8000.")
        self.is_secure = parts.scheme in ("https", "wss")
        self.host, self.port = parts.hostname, port or (443 if self.is_secure else 80)
        self._place = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")
        self.headers: dict[str, str] = {}
        if parts.password is not None:
            pair = f"{parts.username or ''}:{unquote(parts.password)}"
            self.headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        elif token := os.environ.get(TOKEN_VARIABLE):
            self.headers["Authorization"] = f"Bearer {token}"

    def __str__(self) -> str:
        """Show it without a token."""
        return f"http{'s' * self.is_secure}://{self._place}{self._path}"

    def read(self, route: str) -> dict[str, Any]:
        """Return what a route says.

        Raises:
            ConfigurationError: If the server wants another token.
            OSError: If there is no answer, or none of ours.
        """
        # A connection's own timeout is for each piece, and a server may send many; whoever looks
        # for a server keeps the others waiting.
        status, body = call_with_deadline(lambda: self._get(route), LOOK_SECONDS)
        if status in _UNAUTHORIZED:
            raise ConfigurationError(
                f"{self} wants a token: set {TOKEN_VARIABLE} to what it was started with."
            )
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if status != http.client.OK or not isinstance(said, dict):
            raise OSError(f"it is no server of ours (status {status} at {route})")
        return said

    def _get(self, route: str) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self.is_secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=LOOK_SECONDS)
        until, body = time.monotonic() + LOOK_SECONDS, bytearray()
        try:
            connection.request("GET", self._path + route, headers=self.headers)
            response = connection.getresponse()
            while piece := response.read1(_PIECE_BYTES):
                body += piece
                if time.monotonic() > until or len(body) > MAX_REPLY_BYTES:
                    raise OSError(f"its answer does not end ({len(body):,} bytes so far)")
        except http.client.HTTPException as error:
            raise OSError(f"it speaks no HTTP ({type(error).__name__})") from error
        finally:
            connection.close()
        return response.status, bytes(body)

    def connect(self) -> "AbstractContextManager[ClientConnection]":
        """Return what opens a session, and closes it again."""
        from websockets.sync.client import connect

        session: AbstractContextManager[ClientConnection] = connect(
            f"ws{'s' * self.is_secure}://{self._place}{self._path}/ws",
            additional_headers=self.headers, open_timeout=LOOK_SECONDS, close_timeout=1.0,
            max_size=MAX_REPLY_BYTES, compression=None, proxy=None,
        )  # fmt: skip
        return session


class Link:
    """One session on one of several servers that serve the same environment."""

    def __init__(self, urls: str | Sequence[str], *, patience: float, timeout: float) -> None:
        """Know the servers; `open` connects to one.

        Args:
            urls: Where they are.
            patience: Seconds to look for one that is there.
            timeout: Seconds an answer may take, and to wait for room.

        Raises:
            ConfigurationError: If there is none, or a URL is none.
        """
        self.addresses = [Address(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.addresses:
            raise ConfigurationError("url: name at least one server, http://host:8000.")
        self._patience, self._timeout = patience, timeout
        self.fingerprint: str | None = None
        """What the servers' description has to be the same as."""
        self.is_current = False
        """Whether the session is where the client's episode is; for the client's use."""
        self.num_opened = 0
        """How many sessions there have been."""
        self._socket: ClientConnection | None = None
        self._closing = ExitStack()
        self._address = self.addresses[0]
        self._owner = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether there is a session; a forked process does not have its parent's."""
        return self._socket is not None and self._owner == os.getpid()

    def describe(self) -> dict[str, Any]:
        """Return what the first server that answers says of its environment.

        Raises:
            ServerError: If none answers in time.
        """
        return self._retried(self._read_description)

    def open(self) -> None:
        """Open a session on the server with the fewest.

        Raises:
            ServerError: If none has room in time; says what each said.
        """
        self.close()
        self._retried(self._connect_to_emptiest)
        self.num_opened += 1

    def ask(self, message: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send a message, and return the data of the answer; `timeout` instead of the usual one.

        Raises:
            SessionLost: If the connection ended first.
            Refusal: If the server did not carry it out.
            TimeoutError: If it took too long.
            ServerError: If the message is too long, or the answer is none.
        """
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None  # noqa: S101 - the caller has looked
        sent = json.dumps(message, default=plain)
        if len(sent) > MAX_MESSAGE_BYTES:
            raise ServerError(f"An action of {len(sent):,} bytes is longer than servers read.")
        try:
            self._socket.send(sent)
            text = self._socket.recv(timeout=timeout or self._timeout)
        except TimeoutError:
            self.close()
            seconds = timeout or self._timeout
            raise TimeoutError(f"{self._address}: no answer in {seconds:g} seconds") from None
        except (ConnectionClosed, OSError) as error:
            self.close()
            raise SessionLost(f"{self._address}: {error}") from error
        try:
            reply = json.loads(text)
            kind, data = reply["type"], reply["data"]
            if kind == "error":
                raise Refusal(data["code"], data["message"], data.get("kind"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise ServerError(f"{self._address} gave no answer of the protocol.") from error
        return data  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the session."""
        self._socket, self.is_current = None, False
        if self._owner == os.getpid():
            self._closing.close()

    def _read_description(self) -> dict[str, Any]:
        reasons = []
        for address in self.addresses:
            try:
                return address.read("/describe")
            except OSError as error:
                reasons.append(f"{address}: {error}")
        raise OSError("; ".join(reasons))

    def _connect_to_emptiest(self) -> None:
        """Connect to the server with the fewest sessions.

        Raises:
            OSError: If that cannot be; says what each server said.
        """
        reasons: list[str] = []
        with _choosing:
            for _, address in sorted(self._with_room(reasons), key=lambda pair: pair[0]):
                try:
                    self._open_session(address)
                except (OSError, Refusal) as error:
                    reasons.append(f"{address}: {error}")
                else:
                    return
        raise OSError("; ".join(reasons))

    def _with_room(self, reasons: list[str]) -> list[tuple[int, Address]]:
        """Return the servers that could take a session; note why not the others."""
        found, is_full = [], False
        now = time.monotonic()
        is_here = [now >= _away_until.get(str(address), 0.0) for address in self.addresses]
        for address, here in zip(self.addresses, is_here, strict=True):
            if not here and any(is_here):
                continue
            try:
                said = address.read("/capacity")
                active, most = int(said["active_sessions"]), int(said["max_sessions"])
                num_open = int(said["open_sessions"])
            except (OSError, KeyError, TypeError, ValueError) as error:
                # From now on: to find out may have taken as long.
                _away_until[str(address)] = time.monotonic() + AVOID_SECONDS
                reasons.append(f"{address}: {error}")
                continue
            if self.fingerprint not in (None, said.get("fingerprint")):
                reasons.append(f"{address}: it serves another environment")
            elif active >= most:
                is_full = True
                reasons.append(f"{address}: all its {most} sessions are taken")
            else:
                found.append((num_open, address))
        if is_full and not found:
            raise NoRoom("; ".join(reasons))
        return found

    def _open_session(self, address: Address) -> None:
        from websockets.exceptions import WebSocketException

        try:
            self._closing, self._owner = ExitStack(), os.getpid()
            self._socket = self._closing.enter_context(address.connect())
            self._address = address
            # A server without room says so to the first message.
            self.ask({"type": "state"}, LOOK_SECONDS)
        except (WebSocketException, ServerError) as error:
            raise OSError(str(error)) from error
        except Refusal:
            self.close()
            raise

    def _retried(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns as soon as it does not fail."""
        started, pause = time.monotonic(), 0.05
        while True:
            try:
                return attempt()
            except OSError as error:
                limit, name = self._patience, "patience"
                if isinstance(error, NoRoom):
                    limit, name = self._timeout, "timeout"
                if time.monotonic() + pause > started + limit:
                    raise ServerError(
                        f"No server took the episode in {limit:g} seconds ({error}). Start more: "
                        f"python -m agent_envs.serve ID; or wait longer: {name}=."
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
