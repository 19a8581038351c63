"""Tools of MCP servers (Model Context Protocol), over stdio and streamable HTTP.

::

    gym.make("My/Env-v0", tools=[McpServer("http://127.0.0.1:8000/mcp")])
    gym.make("My/Env-v0", tools=[McpServer("python weather_server.py")])

Servers are untrusted: results are observations, texts are cut, and schemas only provide names; the
server itself validates the values of arguments.
"""

import contextlib
import functools
import json
import logging
import math
import os
import re
import shlex
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from anyio.from_thread import BlockingPortalProvider

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.core.lookup import require_extra
from agent_envs.core.tool import (
    DEFAULT_MAX_RESULT_CHARS,
    TOOL_TIMEOUT_TEXT,
    Tool,
    ToolResult,
    ToolSession,
)
from agent_envs.errors import ConfigurationError, SnapshotError
from agent_envs.formats.actions import example_arguments, leading_text_argument

if TYPE_CHECKING:
    import mcp

DEAD_TEXT: Final = (
    "The server of the tool '{name}' gave no answer. The next call connects again; the effects of "
    "earlier calls may be lost."
)
CHANGED_TEXT: Final = "\n[The server's tools have changed. There are now: {tools}.]"
NO_TEXT: Final = "(no text)"
MAX_DESCRIPTION_CHARS: Final = 2_000
MAX_SCHEMA_CHARS: Final = 20_000
CONNECT_SECONDS: Final = 20.0
LIST_SECONDS: Final = 10.0
MAX_PAGES: Final = 20
MAX_TOOLS: Final = 128
_GRACE_SECONDS: Final = CONNECT_SECONDS + LIST_SECONDS
"""Time of a call beyond its timeout: to connect, and to check whether the server is alive."""
_MAX_LOG_CHARS: Final = 500
_LOGGER: Final = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server whose tools an environment offers; goes into ``tools=``."""

    server: str
    """The URL of a streamable HTTP endpoint, or the command that starts a server on stdio."""
    timeout: float = 30.0
    """Seconds that a call may take."""
    shared: bool = False
    """Whether one session serves all environments and episodes of this process: for servers that
    keep no state. Otherwise each episode has its own."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that a command gets besides a few harmless ones, by name."""
    token_env: str | None = None
    """The environment variable that holds the bearer token of a URL."""
    max_result_chars: int = DEFAULT_MAX_RESULT_CHARS
    """Longer results are cut, and say so."""

    def open(self) -> ToolSession:
        """Begin a session.

        Raises:
            MissingExtraError: Without the extra ``mcp``.
            ConfigurationError: If an argument is invalid, or the server cannot be reached.
        """
        require_extra("mcp", "An MCP server", "mcp")
        if not self.timeout > 0:
            raise ConfigurationError(f"timeout must be above 0, not {self.timeout}.")
        if not self.shared:
            return McpSession(self)
        with _SHARED_LOCK:
            key = self, os.getpid()
            return _SHARED.get(key) or _SHARED.setdefault(key, McpSession(self))


class McpSession:
    """The tools of a server in one environment; a thread-safe `ToolSession`."""

    def __init__(self, server: McpServer) -> None:
        """Connect, and list the tools."""
        self.server = server
        self.tools: Sequence[Tool] = ()
        """The tools that the server offers."""
        self._variables = {name: _variable(name) for name in server.pass_env}
        self._token = None if server.token_env is None else _variable(server.token_env)
        self._lock = threading.Lock()
        self._connection: tuple[int, mcp.Client, weakref.finalize[..., Any]] | None = None
        self._was_called = self._tools_have_changed = False
        self._listed: list[mcp.Tool] | None = None
        try:
            self._list_tools()
        except _ServerFailed as error:
            raise ConfigurationError(f"The MCP server cannot be used: {error}") from error

    def begin_episode(self) -> None:
        """Begin a new session with the server if the last episode may have changed something."""
        if self.server.shared:
            return
        if self._was_called:
            self._disconnect()
            self._was_called = False
        try:
            self._list_tools()
        except _ServerFailed as error:  # the next call reports it to the model
            _LOGGER.warning("%s", error)

    def close(self) -> None:
        """End the session unless it is shared."""
        if not self.server.shared:
            self._disconnect(wait=True)
            self._was_called = False

    def call(self, tool: "McpTool", arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; all errors are results."""
        # what JSON cannot represent, half of a surrogate pair, is replaced
        sent = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        self._was_called = True
        request = functools.partial(_call_tool, tool.name_there, sent)
        try:
            result = _read(self._request(request, self.server.timeout))
        except (TimeoutError, _ServerRefused) as error:
            if isinstance(error, TimeoutError):
                text = TOOL_TIMEOUT_TEXT.format(name=tool.name, timeout=self.server.timeout)
                result = ToolResult(text, error="tool_timeout", exception=str(error))
            else:
                result = ToolResult(str(error), error="tool_error")
            try:
                self._request(_list, LIST_SECONDS)  # is the server alive?
            except _FAILURES:
                return self._dead(tool, error)
        except _ServerFailed as error:
            return self._dead(tool, error)
        if not self._tools_have_changed:
            return result
        before = self.tools
        with contextlib.suppress(_ServerFailed):  # the next call reports it
            self._list_tools()
        if self.tools is before:
            return result
        text = CHANGED_TEXT.format(tools=", ".join(map(_signature, self.tools)) or "none")
        return ToolResult(result.content + text, data=result.data, error=result.error)

    def __getstate__(self) -> dict[str, Any]:
        """Save nothing: the state of the server is not accessible."""
        if self._was_called and not self.server.shared:
            raise SnapshotError(
                f"the state of the MCP server {self.server.server!r} cannot be copied; pass "
                "shared=True if it keeps none"
            )
        return {}

    def _dead(self, tool: "McpTool", error: Exception) -> ToolResult:
        _LOGGER.warning("%s: %s", self.server.server, error)
        self._disconnect()
        text = DEAD_TEXT.format(name=tool.name)
        return ToolResult(text, error="tool_error", exception=str(error))

    def _list_tools(self) -> None:
        """List the tools, on a new connection if the present one fails."""
        was_connected, self._tools_have_changed = self._connection is not None, False
        try:
            listed = self._request(_list, LIST_SECONDS)
        except _FAILURES as error:
            self._disconnect()
            if was_connected:
                return self._list_tools()
            raise _ServerFailed(f"{self.server.server}: {error}") from error
        if listed != self._listed:
            self._listed = listed
            tools = [McpTool(tool, self) for tool in listed]
            for tool in filter(_is_too_large, tools):
                _LOGGER.warning("%s: the schema of %s is too long", self.server.server, tool.name)
            self.tools = tuple(tool for tool in tools if not _is_too_large(tool))
        return None

    def _request(self, send: "Callable[[mcp.Client], Awaitable[_T]]", seconds: float) -> _T:
        import anyio
        import mcp
        from mcp.types import REQUEST_TIMEOUT

        with self._lock:
            if self._connection is None or self._connection[0] != os.getpid():  # or a fork
                self._connection = (os.getpid(), *self._connect())
            client = self._connection[1]

        async def limited() -> _T:
            with anyio.fail_after(seconds):
                return await send(client)

        try:
            with _portals as portal:
                return portal.call(limited)
        except mcp.MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(str(error)) from error
            raise _ServerRefused(str(error)) from error
        except TimeoutError:
            raise
        except Exception as error:
            raise _ServerFailed(f"{type(error).__name__}: {error}") from error

    def _connect(self) -> "tuple[mcp.Client, weakref.finalize[..., Any]]":
        import mcp

        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `_end`
        on_message = functools.partial(_on_message, weakref.ref(self))
        # A session needs the older handshake: the newer protocol (2026-07-28) has none.
        for mode in ("legacy", "auto"):
            stack = contextlib.ExitStack()
            try:
                portal = stack.enter_context(_portals)
                connected = self._client(mode, errors, on_message)
                client = stack.enter_context(portal.wrap_async_context_manager(connected))
            except Exception as error:  # noqa: BLE001 - of any library below; it is reported
                stack.close()
                problem = f"{type(error).__name__}: {error}"
                if not isinstance(error, mcp.MCPError):
                    break
            else:
                return client, weakref.finalize(self, _end, os.getpid(), stack, errors)
        errors.seek(0)
        log = errors.read()[-_MAX_LOG_CHARS:].strip()
        errors.close()
        raise _ServerFailed(f"{problem} - it wrote: {log}" if log else problem)

    @contextlib.asynccontextmanager
    async def _client(
        self, mode: str, errors: IO[str], on_message: Callable[[Any], Awaitable[None]]
    ) -> "AsyncIterator[mcp.Client]":
        import anyio
        import httpx2
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        async with contextlib.AsyncExitStack() as stack:
            until = anyio.current_time() + CONNECT_SECONDS
            scope = stack.enter_context(anyio.CancelScope(deadline=until))
            transport: Any
            if self.server.server.startswith(("http://", "https://")):
                headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
                http = httpx2.AsyncClient(headers=headers, timeout=self.server.timeout + 10)
                await stack.enter_async_context(http)
                transport = streamable_http_client(self.server.server, http_client=http)
            else:
                command, *arguments = shlex.split(self.server.server)
                process = mcp.StdioServerParameters(
                    command=command, args=arguments, env=self._variables
                )
                transport = mcp.stdio_client(process, errlog=errors)
            client = mcp.Client(transport, mode=mode, message_handler=on_message)
            await stack.enter_async_context(client)
            scope.deadline = math.inf
            yield client
            return
        raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} seconds")

    def _disconnect(self, *, wait: bool = False) -> None:
        """End the connection, if there is one; in the background unless `wait`."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is None or connection[0] != os.getpid():
            return
        if wait:
            connection[2]()
        else:
            threading.Thread(target=connection[2], daemon=True, name="mcp-end").start()


class McpTool(Tool):
    """A tool of a server, made from its listing."""

    def __init__(self, listed: "mcp.Tool", session: McpSession) -> None:
        """Make a tool; of its schema only names are trusted."""
        self.name_there = listed.name
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", listed.name)[:64] or "tool"
        description = (listed.description or listed.title or self.name).strip()
        self.description = description[:MAX_DESCRIPTION_CHARS]
        self.timeout = session.server.timeout + _GRACE_SECONDS
        self.stateful = not session.server.shared
        self.max_result_chars = session.server.max_result_chars
        self.function: Callable[..., ToolResult] = session.call
        self.parameters = _parameters(listed.input_schema)
        self._is_closed = listed.input_schema.get("additionalProperties") is False
        try:  # formats show examples: a schema may be malformed, or refer to itself without end
            example_arguments(self)
            leading_text_argument(self)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            names: dict[str, Any] = {name: {} for name in self.parameters["properties"]}
            self.parameters = {**_parameters({}), "properties": names}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged; the server validates their values.

        Raises:
            ValueError: If one is missing, or not an argument of this tool.
        """
        problems = [f"'{n}' is missing" for n in self.parameters["required"] if n not in arguments]
        if self._is_closed:
            known = self.parameters["properties"]
            unknown = [name for name in arguments if name not in known]
            problems += [f"'{name}' is not an argument of this tool" for name in unknown]
        if problems:
            raise ValueError("; ".join(problems))
        return dict(arguments)

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Call the tool; an argument may have any name."""
        return self._cut(call_with_deadline(lambda: self.function(self, arguments), self.timeout))


class _ServerFailed(Exception):
    """There is no connection with the server, or it broke."""


class _ServerRefused(Exception):
    """The server answered with an error of the protocol."""


_FAILURES: Final = (_ServerFailed, _ServerRefused, TimeoutError)
_SHARED: Final[dict[tuple[McpServer, int], McpSession]] = {}
_SHARED_LOCK: Final = threading.Lock()


# An event loop for all sessions, apart from the one on which async environments run: these block
# their loop while they wait for a tool. It ends with the last session.
_portals = BlockingPortalProvider()


def _reset_after_fork() -> None:
    global _portals
    _portals = BlockingPortalProvider()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _end(process: int, stack: contextlib.ExitStack, errors: IO[str]) -> None:
    if process == os.getpid():  # a fork has neither the event loop nor the session
        with contextlib.suppress(BaseException):  # a dead server may raise anything
            stack.close()
        errors.close()


async def _on_message(session: "weakref.ref[McpSession]", message: Any) -> None:
    known, method = session(), getattr(message, "method", "")
    if known is not None and method == "notifications/tools/list_changed":
        known._tools_have_changed = True


async def _call_tool(name: str, arguments: dict[str, Any], client: "mcp.Client") -> Any:
    from mcp import types

    # Not `client.call_tool`, which checks results against the server's own schema: its patterns
    # could block every session of this process.
    parameters = types.CallToolRequestParams(name=name, arguments=arguments)
    request = types.CallToolRequest(params=parameters)
    return await client.session.send_request(request, types.CallToolResult)


async def _list(client: "mcp.Client") -> "list[mcp.Tool]":
    tools, cursor = [], None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) >= MAX_TOOLS:
            break
    return tools[:MAX_TOOLS]


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ConfigurationError(f"The environment variable {name} is not set.")
    return os.environ[name]


def _is_too_large(tool: Tool) -> bool:
    return len(json.dumps(tool.parameters)) > MAX_SCHEMA_CHARS


def _signature(tool: Tool) -> str:
    return f"{tool.name}({', '.join(tool.parameters['properties'])})"


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose top level is as formats expect it, whatever a server has sent."""
    given, required = schema.get("properties"), schema.get("required")
    given = given if isinstance(given, dict) else {}
    names = required if isinstance(required, list) else []
    required = {name for name in names if isinstance(name, str)}
    return {
        "type": "object",
        "properties": {
            name: each if isinstance(each, dict) else {} for name, each in given.items()
        },
        "required": [name for name in given if name in required],
        **{k: schema[k] for k in ("$defs", "definitions") if isinstance(schema.get(k), dict)},
    }


def _read(result: "mcp.types.CallToolResult") -> ToolResult:
    """Return the observation: texts unchanged, a line for any other content."""
    parts = [_read_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts) or NO_TEXT
    error = "tool_error" if result.is_error else None
    return ToolResult(text, data=result.structured_content, error=error)


def _read_block(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, {len(block.data) * 3 // 4:,} bytes]"
        case "resource_link":
            return f"[resource: {block.name}, {block.uri}]"
        case _:
            resource = block.resource
            if hasattr(resource, "text"):
                return str(resource.text)
            return f"[resource: {resource.uri}, {len(resource.blob) * 3 // 4:,} bytes]"
