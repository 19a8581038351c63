"""An environment as an MCP server: ``python -m agent_envs.mcp AgentR1/HotpotQA-v0 --seed 3``.

Each session plays episodes of its own: ``begin_episode`` gives the task, the environment's tools
are tools, and ``submit_answer`` ends it. What is earned is not shown to the client; ``--log`` keeps
it.
"""

import argparse
import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym

from agent_envs.core.command_line import errors_of_one_line, json_object
from agent_envs.core.lookup import require_extra
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError

if TYPE_CHECKING:
    from mcp.server import Server

BEGIN: Final = "begin_episode"
ANSWER: Final = "submit_answer"
OVER_TEXT: Final = f"The episode is over. Call {BEGIN} for the next task."
NO_TURNS_TEXT: Final = f"No turn is left: the episode is over. Call {BEGIN} for the next task."
FAILED_TEXT: Final = f"The environment failed: the episode is over. Call {BEGIN} for another task."
NO_SESSION_TEXT: Final = "Each client plays in a session: begin with the initialize handshake."
OBSERVATION_URI: Final = "episode://observation"
MAX_SESSIONS: Final = 256
_OWN_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": BEGIN,
        "description": "Begin an episode, and read its task. What was begun before is given up.",
        "input_schema": {
            "type": "object",
            "properties": {"task": {"type": "integer", "description": "Its number; else drawn."}},
        },
    },
    {
        "name": ANSWER,
        "description": "Answer the task, or say something to the user where there is one.",
        "input_schema": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a client reads after a call."""

    text: str
    """What the environment says."""
    is_error: bool = False
    """Whether the call was a mistake, or failed."""


class Session:
    """The episodes of one client, one after the other; each call of a tool is a turn."""

    def __init__(self, env: gym.Env[str, str], *, seed: int | None, log: Path | None) -> None:
        """Play in `env`; the first episode's task is drawn by `seed`."""
        self._env, self._log = env, log
        self._base: Any = env.unwrapped
        self._lock = threading.Lock()
        self.turn = asyncio.Lock()
        """For a server: so that calls wait for each other without a thread each."""
        self._earned: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._is_over, self._is_fresh = False, True
        self.observation = ""
        """What the environment said last."""
        self._reset(seed=seed)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that may be called now: name, description and schema of the arguments."""
        offered = [tool.schema["function"] for tool in self._base.tools.values()]
        return [
            *_OWN_TOOLS,
            *(
                {
                    "name": each["name"],
                    "description": each["description"],
                    "input_schema": each["parameters"],
                }
                for each in offered
                if each["name"] not in (BEGIN, ANSWER)
            ),
        ]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Carry out a call, one at a time."""
        with self._lock:
            if name == BEGIN:
                return self._begin(arguments)
            if self._is_over:
                return Reply(text=OVER_TEXT, is_error=True)
            if name == ANSWER and not isinstance(arguments.get("answer"), str):
                return Reply(text="'answer' must be a text.", is_error=True)
            action = (
                self._base.write_answer(arguments["answer"])
                if name == ANSWER
                else self._base.write_call(name, **arguments)
            )
            return self._step(action)

    def close(self) -> None:
        """Give up the episode, and close the environment."""
        with self._lock:
            self._keep("given_up")
            self._env.close()

    def _begin(self, arguments: Mapping[str, Any]) -> Reply:
        task = arguments.get("task")
        if self._is_fresh and task is None:  # the task that the session began with
            self._is_fresh = False
            return Reply(text=self.observation)
        self._keep("given_up")
        try:
            self._reset(options={} if task is None else {"task": task})
        except ConfigurationError as error:
            self._is_over = True
            return Reply(text=str(error), is_error=True)
        self._is_fresh = False
        return Reply(text=self.observation)

    def _reset(self, **how: Any) -> None:
        self.observation, self._info = self._env.reset(**how)
        self._is_over, self._earned = False, {}

    def _step(self, action: str) -> Reply:
        self._is_fresh = False
        try:
            self.observation, _, terminated, truncated, self._info = self._env.step(action)
        except Exception as error:  # noqa: BLE001 - of any environment; it is kept
            self._keep(f"{type(error).__name__}: {error}")
            return Reply(text=FAILED_TEXT, is_error=True)
        for term, value in self._info["reward_terms"].items():
            self._earned[term] = self._earned.get(term, 0.0) + value
        parts = [self.observation] if self.observation else []
        if terminated or truncated:
            parts.append(OVER_TEXT if terminated else NO_TURNS_TEXT)
            self._keep("terminated" if terminated else "truncated")
        return Reply(text="\n\n".join(parts), is_error="error" in self._info["action"])

    def _keep(self, end: str) -> None:
        """Write down how an episode ended; one in which nothing was done does not count."""
        was_over, self._is_over = self._is_over, True
        if self._log is None or was_over or "metrics" not in self._info:
            return
        row = {
            "task_id": self._info["task_id"], "end": end, "return": sum(self._earned.values()),
            "reward_terms": self._earned, "metrics": self._info["metrics"],
        }  # fmt: skip
        with _WRITING, self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


_WRITING: Final = threading.Lock()


class EnvironmentServer:
    """Makes a session for each client, and forgets those that were idle longest."""

    def __init__(
        self, env_id: str, kwargs: Mapping[str, Any], *, seed: int | None, log: Path | None
    ) -> None:
        """Make the environment once, to be told early what is wrong with it.

        Raises:
            ConfigurationError: If it is no environment with tools.
        """
        require_extra("mcp", "python -m agent_envs.mcp", "mcp")
        self._id, self._kwargs = env_id, dict(kwargs)
        self._seed, self._log = seed, log
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()
        self._spare: Session | None = self._make()

    def session(self, key: str) -> Session:
        """Return the session of a client; a new one begins where every session does."""
        with self._lock:
            session, spare = self._sessions.get(key), None
            if session is None:
                spare, self._spare = self._spare, None
        made = session or spare or self._make()  # which others do not wait for
        given_up = []
        with self._lock:
            session = self._sessions.setdefault(key, made)
            self._sessions.move_to_end(key)
            if session is not made:  # another call of this client was faster
                given_up.append(made)
            if len(self._sessions) > MAX_SESSIONS:
                given_up.append(self._sessions.popitem(last=False)[1])
        for each in given_up:
            each.close()  # which waits for a call that is under way; the others do not
        return session

    def close(self) -> None:
        """Close all sessions."""
        for session in self._sessions.values():
            session.close()

    def build(self, *, over_http: bool) -> "Server":
        """Return the server of the protocol."""
        from anyio import CapacityLimiter
        from mcp import types
        from mcp.server import Server

        # Each session takes one at a time; those that are given up may still be at work in theirs.
        self._threads = CapacityLimiter(2 * MAX_SESSIONS)
        server: Server = Server(
            self._id,
            instructions=f"Call {BEGIN} for a task, and {ANSWER} to answer it.",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_read_resource=self._read_resource,
        )
        if over_http:
            # Episodes need sessions, which the newest protocol (2026-07-28) does not have: clients
            # that ask for it take this for an older server, and begin one.
            server.add_request_handler("server/discover", types.RequestParams, _no_session)
        return server

    async def _find(self, context: Any) -> Session:
        from anyio import to_thread

        key = ""  # on stdio there is one client
        if context.request is not None:
            key = context.request.headers.get("mcp-session-id") or await _no_session()
        return await to_thread.run_sync(self.session, key, limiter=self._threads)

    async def _list_tools(self, context: Any, _: Any) -> Any:
        from mcp import types

        session = await self._find(context)
        return types.ListToolsResult(tools=[types.Tool(**tool) for tool in session.tools])

    async def _call_tool(self, context: Any, asked: Any) -> Any:
        from anyio import to_thread
        from mcp import types

        session = await self._find(context)
        arguments = dict(asked.arguments or {})
        async with session.turn:
            before = session.tools
            reply = await to_thread.run_sync(
                session.call, asked.name, arguments, limiter=self._threads
            )
        if session.tools != before:
            await context.session.send_tool_list_changed()
        said = types.TextContent(text=_sendable(reply.text))
        return types.CallToolResult(content=[said], is_error=reply.is_error)

    async def _list_resources(self, context: Any, _: Any) -> Any:
        from mcp import types

        about = {"name": "observation", "uri": OBSERVATION_URI, "mime_type": "text/plain"}
        return types.ListResourcesResult(resources=[types.Resource(**about)])

    async def _read_resource(self, context: Any, asked: Any) -> Any:
        import mcp
        from mcp import types

        if str(asked.uri) != OBSERVATION_URI:
            raise mcp.MCPError(types.INVALID_PARAMS, f"There is only {OBSERVATION_URI}.")
        text = _sendable((await self._find(context)).observation)
        contents = types.TextResourceContents(uri=OBSERVATION_URI, text=text)
        return types.ReadResourceResult(contents=[contents])

    def _make(self) -> Session:
        env: gym.Env[str, str] = gym.make(self._id, tool_format="openai", **self._kwargs)
        if not isinstance(env.unwrapped, ToolEnv):
            raise ConfigurationError(f"{self._id} is no environment with tools.")
        return Session(env, seed=self._seed, log=self._log)


async def _no_session(*_: Any) -> Any:
    import mcp
    from mcp import types

    raise mcp.MCPError(types.METHOD_NOT_FOUND, NO_SESSION_TEXT)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: serve on stdio, or over streamable HTTP with ``--port``."""
    parser = argparse.ArgumentParser(prog="python -m agent_envs.mcp", description=__doc__)
    parser.add_argument("env", help="Gymnasium id, with its module if it is yours")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--seed", type=int, help="seed of each session's first episode")
    parser.add_argument("--log", type=Path, help="file to which each episode's rewards are added")
    parser.add_argument("--port", type=int, help="serve http://HOST:PORT/mcp instead of stdio")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; nobody is asked")
    options = parser.parse_args(arguments)
    with errors_of_one_line("mcp"):
        kwargs = json_object(options.kwargs, "--kwargs")
        served = EnvironmentServer(options.env, kwargs, seed=options.seed, log=options.log)
    try:
        if options.port is None:
            _serve_stdio(served.build(over_http=False))
        else:
            _serve_http(served.build(over_http=True), options.host, options.port)
    finally:
        served.close()


def _serve_stdio(server: "Server") -> None:
    import anyio
    from mcp import stdio_server
    from mcp.server.lowlevel import NotificationOptions

    async def run() -> None:
        options = server.create_initialization_options(NotificationOptions(tools_changed=True))
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, options)

    anyio.run(run)


def _serve_http(server: "Server", host: str, port: int) -> None:
    import uvicorn

    app = server.streamable_http_app(host=host, max_sessions=MAX_SESSIONS)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
