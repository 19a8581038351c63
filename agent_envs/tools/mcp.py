"""Tools of MCP servers (Model Context Protocol), over stdio and streamable HTTP.

::

    gym.make("My/Env-v0", tools=[McpServer("http://127.0.0.1:8000/mcp")])
    gym.make("My/Env-v0", tools=[McpServer("python weather_server.py")])

Whatever a server says is data: its results are observations, its texts are cut, and its schemas
are looked at for names only; it judges the arguments itself.
"""

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

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
from agent_envs.tools.mcp_connection import Connection, FailedError

if TYPE_CHECKING:
    import mcp

DEAD_TEXT: Final = (
    "The server of the tool '{name}' gave no answer. It is asked anew with the next call, and may "
    "have forgotten what earlier calls changed."
)
CHANGED_TEXT: Final = "\n[The server's tools have changed. There are now: {tools}.]"
NO_TEXT: Final = "(no text)"
MAX_DESCRIPTION_CHARS: Final = 2_000
MAX_SCHEMA_CHARS: Final = 20_000
_GRACE_SECONDS: Final = 30.0
"""How long a call may take beyond its own time: to begin a session, to see whether one is alive."""
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server; what it offers is offered by an environment that has it in ``tools=``."""

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
            ConfigurationError: If an argument makes no sense, or the server cannot be reached.
        """
        require_extra("mcp", "An MCP server", "mcp")
        if not self.timeout > 0:
            raise ConfigurationError(f"timeout must be above 0, not {self.timeout}.")
        if not self.shared:
            return McpSession(self)
        with _OPENING:
            if (self, os.getpid()) not in _SHARED:
                _SHARED[self, os.getpid()] = McpSession(self)
            return _SHARED[self, os.getpid()]


class McpSession:
    """The tools of a server as one environment has them; a `ToolSession`."""

    def __init__(self, server: McpServer) -> None:
        """Connect, and ask which tools there are."""
        self.server = server
        self._connection = Connection(
            server.server, pass_env=server.pass_env, token_env=server.token_env,
            call_seconds=server.timeout,
        )  # fmt: skip
        self._was_called = False
        self._listed = ""
        self.tools: Sequence[Tool] = ()
        """What the server offers."""
        try:
            self._list()
        except FailedError as error:
            self._connection.drop()
            raise ConfigurationError(f"The MCP server cannot be used: {error}") from error

    def begin_episode(self) -> None:
        """Begin a new session with the server if the last episode may have changed something."""
        if self.server.shared:
            return
        if self._was_called:
            self._connection.drop()
            self._was_called = False
        try:
            self._list()
        except FailedError as error:  # its calls will say so
            _LOGGER.warning("%s", error)

    def close(self) -> None:
        """End the session; a shared one goes on."""
        if not self.server.shared:
            self._connection.drop(wait=True)
            self._was_called = False

    def call(self, tool: "McpTool", arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; whatever goes wrong is a result."""
        # what JSON cannot hold, half of a surrogate pair, is replaced
        sent = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        self._was_called = True
        try:
            result = _read(self._connection.call(tool.name_there, sent))
            if self._connection.tools_have_changed and (shown := self._changes()):
                result = ToolResult(result.content + shown, data=result.data, error=result.error)
        except TimeoutError as error:
            text = TOOL_TIMEOUT_TEXT.format(name=tool.name, timeout=self.server.timeout)
            return ToolResult(text, error="tool_timeout", exception=str(error))
        except FailedError as error:
            _LOGGER.warning("%s", error)
            text = DEAD_TEXT.format(name=tool.name)
            return ToolResult(text, error="tool_error", exception=str(error))
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Save nothing: what the server holds cannot be had."""
        if self._was_called and not self.server.shared:
            raise SnapshotError(
                f"the state of the MCP server {self.server.server!r} cannot be copied; pass "
                "shared=True if it keeps none"
            )
        return {}

    def _changes(self) -> str:
        before = self.tools
        with contextlib.suppress(FailedError):  # the next call will say so
            self._list()
        if self.tools is before:
            return ""
        return CHANGED_TEXT.format(tools=", ".join(map(_signature, self.tools)) or "none")

    def _list(self) -> None:
        listed = self._connection.list_tools()
        if (described := json.dumps([_describe(tool) for tool in listed])) != self._listed:
            self._listed = described
            tools = [McpTool(tool, self) for tool in listed]
            for tool in filter(_is_too_large, tools):
                _LOGGER.warning("%s: the schema of %s is too long", self.server.server, tool.name)
            self.tools = tuple(tool for tool in tools if not _is_too_large(tool))


_OPENING: Final = threading.Lock()
_SHARED: Final[dict[tuple[McpServer, int], McpSession]] = {}


class McpTool(Tool):
    """A tool of a server, as its listing describes it."""

    def __init__(self, listed: "mcp.Tool", session: McpSession) -> None:
        """Make a tool from its listing."""
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
        try:  # formats show examples: a schema may be malformed, or refer to itself without an end
            example_arguments(self)
            leading_text_argument(self)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            names: dict[str, Any] = {name: {} for name in self.parameters["properties"]}
            self.parameters = {**_parameters({}), "properties": names}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are; whether their values fit, the server says.

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
        """Call it; an argument may have any name."""
        return self._cut(call_with_deadline(lambda: self.function(self, arguments), self.timeout))

    def __repr__(self) -> str:
        """Show name and arguments."""
        return f"McpTool({_signature(self)})"


def _is_too_large(tool: Tool) -> bool:
    return len(json.dumps(tool.parameters)) > MAX_SCHEMA_CHARS


def _signature(tool: Tool) -> str:
    return f"{tool.name}({', '.join(tool.parameters['properties'])})"


def _describe(tool: "mcp.Tool") -> Any:
    return [tool.name, tool.description, tool.title, tool.input_schema]


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose top is as formats expect it, whatever a server has sent."""
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
    """Return what the model reads: texts as they are, and what else there is by a line each."""
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
