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
)
from agent_envs.errors import ConfigurationError
from agent_envs.formats.actions import example_arguments, leading_text_argument

if TYPE_CHECKING:
    import mcp

DEAD_TEXT: Final = (
    "The server of the tool '{name}' gave no answer. The next call connects again; the effects of "
    "earlier calls may be lost."
)
MAX_DESCRIPTION_CHARS: Final = 2_000
MAX_SCHEMA_CHARS: Final = 20_000
MAX_PAGES: Final = 20
MAX_TOOLS: Final = 128
CONNECT_SECONDS: Final = 20.0
LIST_SECONDS: Final = 10.0
_MAX_LOG_CHARS: Final = 500
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

    def open(self) -> "McpSession":
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
        with _sharing:
            return _shared_session(self, os.getpid())


class McpSession:
    """The tools of a server in one environment; thread-safe."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._variables = {name: _variable(name) for name in server.pass_env}
        self._token = None if server.token_env is None else _variable(server.token_env)
        self._lock = threading.Lock()
        self._connection: tuple[int, mcp.Client, weakref.finalize[..., Any]] | None = None
        self._was_called = False
        try:
            tools = [McpTool(listed, self) for listed in self._request(_list, LIST_SECONDS)]
        except Exception as error:
            self._disconnect()
            raise ConfigurationError(
                f"The MCP server {server.server} cannot be used: {error}"
            ) from error
        self.tools: Sequence[Tool] = tuple(
            tool for tool in tools if len(json.dumps(tool.parameters)) <= MAX_SCHEMA_CHARS
        )
        """The tools that the server offers."""

    def begin_episode(self) -> None:
        """Begin a new session with the server if the last episode may have changed something."""
        if self._was_called and not self.server.shared:
            self._disconnect()

    def close(self) -> None:
        """End the session unless it is shared."""
        if not self.server.shared:
            self._disconnect()

    def call(self, tool: "McpTool", arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; all errors are results."""
        from mcp import MCPError, types

        # what JSON cannot represent, half of a surrogate pair, is replaced
        sent = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        self._was_called = True
        parameters = types.CallToolRequestParams(name=tool.name_there, arguments=sent)
        request = types.CallToolRequest(params=parameters)

        # Not `client.call_tool`, which checks results against the server's own schema: its patterns
        # could block every session of this process.
        async def call(client: "mcp.Client") -> Any:
            return await client.session.send_request(request, types.CallToolResult)

        try:
            return _read(self._request(call, self.server.timeout))
        except TimeoutError as error:
            text = TOOL_TIMEOUT_TEXT.format(name=tool.name, timeout=self.server.timeout)
            result = ToolResult(text, error="tool_timeout", exception=str(error))
        except Exception as error:  # noqa: BLE001 - of any library below
            is_refusal = isinstance(error, MCPError)
            text = str(error) if is_refusal else DEAD_TEXT.format(name=tool.name)
            exception = None if is_refusal else repr(error)
            result = ToolResult(text, error="tool_error", exception=exception)
        try:
            self._request(_list, LIST_SECONDS)  # is the server alive?
        except Exception as error:  # noqa: BLE001
            self._disconnect()
            text = DEAD_TEXT.format(name=tool.name)
            return ToolResult(text, error="tool_error", exception=repr(error))
        return result

    def _request(self, send: "Callable[[mcp.Client], Awaitable[_T]]", seconds: float) -> _T:
        import anyio

        with self._lock:
            if self._connection is None or self._connection[0] != os.getpid():  # or a fork
                self._connection = (os.getpid(), *self._connect())
            client = self._connection[1]

        async def limited() -> _T:
            with anyio.fail_after(seconds):
                return await send(client)

        with _portals as portal:
            return portal.call(limited)

    def _connect(self) -> "tuple[mcp.Client, weakref.finalize[..., Any]]":
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `_end`
        stack = contextlib.ExitStack()
        try:
            portal = stack.enter_context(_portals)
            client = stack.enter_context(portal.wrap_async_context_manager(self._client(errors)))
        except Exception as error:
            stack.close()
            errors.seek(0)
            log = errors.read()[-_MAX_LOG_CHARS:].strip()
            errors.close()
            raise ConnectionError(f"{type(error).__name__}: {error}. {log}") from error
        return client, weakref.finalize(self, _end, os.getpid(), stack, errors)

    @contextlib.asynccontextmanager
    async def _client(self, errors: IO[str]) -> "AsyncIterator[mcp.Client]":
        import anyio
        import httpx2
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        async with contextlib.AsyncExitStack() as stack:
            scope = stack.enter_context(anyio.move_on_after(CONNECT_SECONDS))
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
            # A session needs the older handshake: the newer protocol (2026-07-28) has none.
            client = mcp.Client(transport, mode="legacy")
            await stack.enter_async_context(client)
            scope.deadline = float("inf")
            yield client
            return
        raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} seconds")

    def _disconnect(self) -> None:
        """End the connection, if there is one."""
        self._was_called = False
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection[2]()


class McpTool(Tool):
    """A tool of a server, made from its listing."""

    def __init__(self, listed: "mcp.Tool", session: McpSession) -> None:
        """Make a tool; of its schema only names are trusted."""
        self.name_there = listed.name
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", listed.name)[:64] or "tool"
        description = (listed.description or listed.title or self.name).strip()
        self.description = description[:MAX_DESCRIPTION_CHARS]
        # A call may have to connect, and to check whether the server is alive.
        self.timeout = session.server.timeout + CONNECT_SECONDS + LIST_SECONDS
        self.stateful = not session.server.shared
        self.max_result_chars = session.server.max_result_chars
        # A snapshot replays the calls of methods of objects, but a shared session has no state.
        self.function = session.call if self.stateful else functools.partial(session.call)
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
        known = self.parameters["properties"]
        problems = [f"'{n}' is missing" for n in self.parameters["required"] if n not in arguments]
        unknown = [name for name in arguments if name not in known] if self._is_closed else []
        if problems := problems + [f"'{n}' is not an argument of this tool" for n in unknown]:
            raise ValueError("; ".join(problems))
        return dict(arguments)

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Call the tool; an argument may have any name."""
        return self._cut(call_with_deadline(lambda: self.function(self, arguments), self.timeout))


_sharing = threading.Lock()


@functools.cache
def _shared_session(server: McpServer, _: int) -> McpSession:
    return McpSession(server)


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


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose top level is as formats expect it, whatever a server has sent."""
    given, names = schema.get("properties"), schema.get("required")
    given = given if isinstance(given, dict) else {}
    required = names if isinstance(names, list) else []
    properties = {name: each if isinstance(each, dict) else {} for name, each in given.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in given if name in required],
        **{k: schema[k] for k in ("$defs", "definitions") if isinstance(schema.get(k), dict)},
    }


def _read(result: "mcp.types.CallToolResult") -> ToolResult:
    """Return the observation: texts unchanged, a line for any other content."""
    parts = [_read_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    error = "tool_error" if result.is_error else None
    return ToolResult("\n".join(parts) or "(no text)", data=result.structured_content, error=error)


def _read_block(block: Any) -> str:
    content = getattr(block, "resource", block)
    if hasattr(content, "text"):
        return str(content.text)
    return f"[{block.type}: {getattr(content, 'uri', None) or content.mime_type}]"
