"""An environment as an MCP server: ``python -m agent_envs.mcp AgentR1/HotpotQA-v0 --seed 3``.

Each client has its own episodes: ``begin_episode`` returns the task, the environment's tools are
tools, and ``submit_answer`` ends the episode. Clients do not see rewards; ``--log`` writes them to
a file.
"""

import argparse
import asyncio
import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
NO_SESSION_TEXT: Final = "Episodes need a session: begin with the initialize handshake."
MAX_SESSIONS: Final = 256
_OWN_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": BEGIN,
        "description": "Begin an episode and read its task. An unfinished episode is given up.",
        "input_schema": {
            "type": "object",
            "properties": {"task": {"type": "integer", "description": "Its number; else drawn."}},
        },
    },
    {
        "name": ANSWER,
        "description": "Answer the task, or write to the user where there is one.",
        "input_schema": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
)


class Reply(NamedTuple):
    """Reply to a call."""

    text: str
    is_error: bool = False


class Session:
    """The episodes of one client, one after the other; each call of a tool is a turn."""

    def __init__(self, env: gym.Env[str, str], *, seed: int | None, log: Path | None) -> None:
        """Run episodes in `env`; `seed` draws the first task."""
        self._env, self._log = env, log
        self._base: Any = env.unwrapped
        self._lock = threading.Lock()
        self.turn = asyncio.Lock()
        """For a server: waiting calls need no thread each."""
        self._reset(seed=seed)
        self._is_fresh = True

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that may be called now: name, description and schema of the arguments."""
        offered = [
            {"name": name, "description": tool.description, "input_schema": tool.parameters}
            for name, tool in self._base.tools.items()
            if name not in (BEGIN, ANSWER)
        ]
        return [*_OWN_TOOLS, *offered]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Run a call, one at a time."""
        with self._lock:
            if name == BEGIN:
                return self._begin(arguments.get("task"))
            if self._is_over:
                return Reply(OVER_TEXT, is_error=True)
            if name != ANSWER:
                return self._step(self._base.write_call(name, **arguments))
            if not isinstance(arguments.get("answer"), str):
                return Reply("'answer' must be a text.", is_error=True)
            return self._step(self._base.write_answer(arguments["answer"]))

    def close(self) -> None:
        """Give up the episode, and close the environment."""
        with self._lock:
            self._end_episode("given_up")
            self._env.close()

    def _begin(self, task: Any) -> Reply:
        if not self._is_fresh or task is not None:  # else the first task, drawn by the seed
            self._end_episode("given_up")
            try:
                self._reset(options={} if task is None else {"task": task})
            except ConfigurationError as error:
                return Reply(str(error), is_error=True)
        self._is_fresh = False
        return Reply(self._observation)

    def _reset(self, **arguments: Any) -> None:
        self._observation, self._info = self._env.reset(**arguments)
        self._is_over = False
        self._totals: dict[str, float] = {}

    def _step(self, action: str) -> Reply:
        self._is_fresh = False
        try:
            observation, _, terminated, truncated, self._info = self._env.step(action)
        except Exception as error:  # noqa: BLE001 - of any environment; it is logged
            self._end_episode(f"{type(error).__name__}: {error}")
            return Reply(FAILED_TEXT, is_error=True)
        for term, value in self._info["reward_terms"].items():
            self._totals[term] = self._totals.get(term, 0.0) + value
        parts = [observation] if observation else []
        if terminated or truncated:
            parts.append(OVER_TEXT if terminated else NO_TURNS_TEXT)
            self._end_episode("terminated" if terminated else "truncated")
        return Reply("\n\n".join(parts), is_error="error" in self._info["action"])

    def _end_episode(self, end: str) -> None:
        """Log an episode, unless it is over or had no step."""
        was_over, self._is_over = self._is_over, True
        if self._log is None or was_over or "metrics" not in self._info:
            return
        row = {
            "task_id": self._info["task_id"], "end": end, "return": sum(self._totals.values()),
            "reward_terms": self._totals, "metrics": self._info["metrics"],
        }  # fmt: skip
        with _LOG_LOCK, self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


_LOG_LOCK: Final = threading.Lock()


class EnvironmentServer:
    """Makes a session for each client; at most `MAX_SESSIONS`, the least recently used ends."""

    def __init__(
        self, env_id: str, kwargs: Mapping[str, Any], *, seed: int | None, log: Path | None
    ) -> None:
        """Make the environment once, so that errors in its arguments are raised here.

        Raises:
            ConfigurationError: If the environment has no tools.
        """
        require_extra("mcp", "python -m agent_envs.mcp", "mcp")
        self._id, self._kwargs = env_id, dict(kwargs)
        self._seed, self._log = seed, log
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()
        self._make().close()

    def session(self, key: str) -> Session:
        """Return the session of a client; a new one is in its first episode."""
        with self._lock:
            session = self._sessions.get(key)
        made = session or self._make()  # without the lock: it may take long
        with self._lock:
            session = self._sessions.setdefault(key, made)
            self._sessions.move_to_end(key)
            is_full = len(self._sessions) > MAX_SESSIONS
            evicted = [self._sessions.popitem(last=False)[1]] if is_full else []
        if session is not made:  # another call of this client was faster
            evicted.append(made)
        for each in evicted:
            each.close()  # waits for a running call
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

        # Each session runs one call at a time; evicted sessions may still be running theirs.
        self._threads = CapacityLimiter(2 * MAX_SESSIONS)
        server: Server = Server(
            self._id,
            instructions=f"Call {BEGIN} for a task, and {ANSWER} to answer it.",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        if over_http:
            # The newer protocol has no session, so no episode: its clients are led
            # to the older one.
            server.add_request_handler("server/discover", types.RequestParams, _refuse)
        return server

    async def _find(self, context: Any) -> Session:
        from anyio import to_thread

        key = ""  # on stdio there is one client
        if context.request is not None:
            key = context.request.headers.get("mcp-session-id") or await _refuse()
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
            reply = await to_thread.run_sync(
                session.call, asked.name, arguments, limiter=self._threads
            )
        text = reply.text.encode("utf-8", "replace").decode()
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=reply.is_error)

    def _make(self) -> Session:
        env: gym.Env[str, str] = gym.make(self._id, tool_format="openai", **self._kwargs)
        if not isinstance(env.unwrapped, ToolEnv):
            raise ConfigurationError(f"{self._id} is not an environment with tools.")
        return Session(env, seed=self._seed, log=self._log)


async def _refuse(*_: Any) -> Any:
    import mcp
    from mcp import types

    raise mcp.MCPError(types.METHOD_NOT_FOUND, NO_SESSION_TEXT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: serve on stdio, or over streamable HTTP with ``--port``."""
    parser = argparse.ArgumentParser(prog="python -m agent_envs.mcp", description=__doc__)
    parser.add_argument("env", help="Gymnasium id, with its module if it is yours")
    parser.add_argument("--env_kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--seed", type=int, help="seed of each session's first episode")
    parser.add_argument("--log", type=Path, help="file to which each episode's rewards are added")
    parser.add_argument("--port", type=int, help="serve http://HOST:PORT/mcp instead of stdio")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; no authentication")
    options = parser.parse_args(arguments)
    with errors_of_one_line("mcp"):
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        environments = EnvironmentServer(options.env, kwargs, seed=options.seed, log=options.log)
    with contextlib.closing(environments):
        server = environments.build(over_http=options.port is not None)
        if options.port is None:
            asyncio.run(_serve_stdio(server))
        else:
            import uvicorn

            app = server.streamable_http_app(host=options.host, max_sessions=MAX_SESSIONS)
            uvicorn.run(
                app, host=options.host, port=options.port, log_level="warning", access_log=False
            )


async def _serve_stdio(server: "Server") -> None:
    from mcp import stdio_server

    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    main()
