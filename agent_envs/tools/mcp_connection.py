"""A connection with an MCP server: begun when it is needed, dropped when it does not answer."""

import atexit
import contextlib
import functools
import math
import os
import shlex
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from agent_envs.errors import ConfigurationError

if TYPE_CHECKING:
    import mcp
    from anyio.from_thread import BlockingPortal

CONNECT_SECONDS: Final = 20.0
LIST_SECONDS: Final = 10.0
MAX_PAGES: Final = 20
MAX_TOOLS: Final = 128
_MAX_LOG_CHARS: Final = 500
_T = TypeVar("_T")


class FailedError(Exception):
    """The server gave no answer; the message names it."""


class Connection:
    """Asks a server, one call at a time or many; safe to use from many threads."""

    def __init__(
        self, server: str, *, pass_env: tuple[str, ...], token_env: str | None, call_seconds: float
    ) -> None:
        """Ask `server`, a URL or a command; see `McpServer` for the rest."""
        self._server, self._call_seconds = server, call_seconds
        self._address = _Address(
            server=server,
            environment={name: _variable(name) for name in pass_env},
            token=None if token_env is None else _variable(token_env),
            read_seconds=call_seconds + LIST_SECONDS,
        )
        self._lock = threading.Lock()
        self._open: tuple[int, mcp.Client, weakref.finalize[..., Any]] | None = None
        self.tools_have_changed = False
        """Whether the server has said so since its tools were listed."""

    def list_tools(self) -> "list[mcp.Tool]":
        """Return what the server offers; asked anew once if an old connection is of no use.

        Raises:
            FailedError: If it gives no answer.
        """
        is_old, self.tools_have_changed = self._open is not None, False
        try:
            return self._ask(self._list, LIST_SECONDS)
        except (FailedError, TimeoutError, _Refused) as error:
            self.drop()
            if not is_old:
                raise FailedError(f"{self._server}: {error}") from error
            return self.list_tools()

    def call(self, name: str, arguments: dict[str, Any]) -> "mcp.types.CallToolResult":
        """Call a tool once.

        Raises:
            TimeoutError: If it takes too long, and the server is there still.
            FailedError: If the server gives no answer; the next call begins a new connection.
        """
        from mcp import types

        try:
            return self._ask(functools.partial(_call, name, arguments), self._call_seconds)
        except _Refused as refused:
            with contextlib.suppress(FailedError, TimeoutError, _Refused):
                self._ask(self._list, LIST_SECONDS)  # is it alive?
                said = [types.TextContent(text=str(refused))]
                return types.CallToolResult(content=list(said), is_error=True)
            self.drop()
            raise FailedError(f"{self._server}: {refused}") from refused
        except TimeoutError:
            try:
                self._ask(self._list, LIST_SECONDS)
            except (FailedError, TimeoutError, _Refused) as error:
                self.drop()
                raise FailedError(f"{self._server}: {error}") from error
            raise
        except FailedError:
            self.drop()
            raise

    def drop(self, *, wait: bool = False) -> None:
        """End the connection, if there is one, in the background unless `wait`."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is None or opened[0] != os.getpid():
            return
        if wait:
            opened[2]()
        else:
            threading.Thread(target=opened[2], daemon=True, name="mcp-end").start()

    def _ask(self, ask: "Callable[[mcp.Client], Awaitable[_T]]", seconds: float) -> _T:
        import anyio
        import mcp
        from mcp.types import REQUEST_TIMEOUT

        client = self._client()

        async def limited() -> _T:
            with anyio.fail_after(seconds):
                return await ask(client)

        try:
            return _portal().call(limited)
        except mcp.MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(str(error)) from error
            raise _Refused(str(error)) from error
        except TimeoutError:
            raise
        except Exception as error:
            raise FailedError(f"{self._server}: {type(error).__name__}: {error}") from error

    async def _list(self, client: "mcp.Client") -> "list[mcp.Tool]":
        tools, cursor = [], None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor, cache_mode="refresh")
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None or len(tools) >= MAX_TOOLS:
                break
        return tools[:MAX_TOOLS]

    def _client(self) -> "mcp.Client":
        with self._lock:
            if self._open is None or self._open[0] != os.getpid():  # or a forked process's parent
                self._open = (os.getpid(), *self._connect())
            return self._open[1]

    def _connect(self) -> "tuple[mcp.Client, weakref.finalize[..., Any]]":
        import mcp

        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `_end`
        problem = ""
        # A session needs the older handshake: the newer protocol (2026-07-28) has none.
        hear = functools.partial(_hear, weakref.ref(self))
        for mode in ("legacy", "auto"):
            connected = self._address.connected(mode, errors, hear)
            entered = _portal().wrap_async_context_manager(connected)
            try:
                client = entered.__enter__()
            except Exception as error:  # noqa: BLE001 - of any library below; it is told on
                problem = f"{type(error).__name__}: {error}"
                if not isinstance(error, mcp.MCPError):
                    break
                continue
            return client, weakref.finalize(self, _end, os.getpid(), entered, errors)
        errors.seek(0)
        said = errors.read()[-_MAX_LOG_CHARS:].strip()
        errors.close()
        raise FailedError(f"{self._server}: {problem}{' - it said: ' if said else ''}{said}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """Where a server is, or how it is started."""

    server: str
    environment: dict[str, str]
    token: str | None
    read_seconds: float

    @contextlib.asynccontextmanager
    async def connected(
        self, mode: str, errors: IO[str], hear: Callable[[Any], Awaitable[None]]
    ) -> "AsyncIterator[mcp.Client]":
        import anyio
        import mcp

        async with contextlib.AsyncExitStack() as stack:
            until = anyio.current_time() + CONNECT_SECONDS
            scope = stack.enter_context(anyio.CancelScope(deadline=until))
            transport = await self._transport(stack, errors)
            client = mcp.Client(transport, mode=mode, message_handler=hear)
            await stack.enter_async_context(client)
            scope.deadline = math.inf
            yield client
            return
        raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} seconds")

    async def _transport(self, stack: contextlib.AsyncExitStack, errors: IO[str]) -> Any:
        import httpx2
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        if self.server.startswith(("http://", "https://")):
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            http = httpx2.AsyncClient(headers=headers, timeout=self.read_seconds)
            await stack.enter_async_context(http)
            return streamable_http_client(self.server, http_client=http)
        command, *arguments = shlex.split(self.server)
        parameters = mcp.StdioServerParameters(
            command=command, args=arguments, env=self.environment
        )
        return mcp.stdio_client(parameters, errlog=errors)


class _Refused(Exception):
    """The server answered, with an error of the protocol."""


async def _call(name: str, arguments: dict[str, Any], client: "mcp.Client") -> Any:
    from mcp import types

    # Not `client.call_tool`, which checks results against the server's own schema: its patterns
    # could keep every session of this process waiting.
    asked = types.CallToolRequestParams(name=name, arguments=arguments)
    request = types.CallToolRequest(params=asked)
    return await client.session.send_request(request, types.CallToolResult)


async def _hear(connection: "weakref.ref[Connection]", message: Any) -> None:
    told, method = connection(), getattr(message, "method", "")
    if told is not None and method == "notifications/tools/list_changed":
        told.tools_have_changed = True


def _end(process: int, entered: Any, errors: IO[str]) -> None:
    if process != os.getpid():  # a forked one, which has neither the event loop nor the session
        return
    with contextlib.suppress(BaseException):  # what a dead server leaves behind
        entered.__exit__(None, None, None)
    errors.close()


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ConfigurationError(f"The environment variable {name} is not set.")
    return os.environ[name]


_STARTING = threading.Lock()
_PORTALS: "Final[dict[int, BlockingPortal]]" = {}
"""The event loop on which all sessions live, by process."""


def _portal() -> "BlockingPortal":
    from anyio.from_thread import start_blocking_portal

    with _STARTING:
        if os.getpid() not in _PORTALS:
            manager = start_blocking_portal(name="mcp")
            _PORTALS[os.getpid()] = manager.__enter__()
            atexit.register(_stop, os.getpid(), manager)
        return _PORTALS[os.getpid()]


def _stop(process: int, manager: "contextlib.AbstractContextManager[BlockingPortal]") -> None:
    """End the loop with all that runs on it, and wait for it: no server is left behind."""
    if process == os.getpid():
        with contextlib.suppress(BaseException):
            manager.__exit__(SystemExit, SystemExit(), None)


def _forget_lock() -> None:
    global _STARTING
    _STARTING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
