"""An environment as an MCP server: ``python -m agent_envs.mcp AgentR1/HotpotQA-v0 --seed 3``.

It serves the client that starts it, on stdio: ``begin_episode`` returns the task, the
environment's tools are tools, and ``submit_answer`` ends the episode. Clients do not see rewards;
``--log`` writes them to a file.
"""

import argparse
import asyncio
import contextlib
import json
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
        """Run episodes in `env`; `seed` draws the first task.

        Raises:
            ConfigurationError: If the environment has no tools.
        """
        if not isinstance(env.unwrapped, ToolEnv):
            raise ConfigurationError(f"{env} is not an environment with tools.")
        self._env, self._log = env, log
        self._base: Any = env.unwrapped
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
        """Run a call."""
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
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def build_server(session: Session, name: str) -> "Server":
    """Return a server of the protocol whose one client runs the episodes of `session`."""
    from anyio import to_thread
    from mcp import types
    from mcp.server import Server

    turn = asyncio.Lock()  # one call at a time

    async def list_tools(*_: Any) -> Any:
        return types.ListToolsResult(tools=[types.Tool(**tool) for tool in session.tools])

    async def call_tool(_: Any, asked: Any) -> Any:
        async with turn:
            reply = await to_thread.run_sync(session.call, asked.name, dict(asked.arguments or {}))
        text = reply.text.encode("utf-8", "replace").decode()
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=reply.is_error)

    return Server(
        name,
        instructions=f"Call {BEGIN} for a task, and {ANSWER} to answer it.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m agent_envs.mcp", description=__doc__)
    parser.add_argument("env", help="Gymnasium id, with its module if it is yours")
    parser.add_argument("--env_kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--seed", type=int, help="seed of the first episode")
    parser.add_argument("--log", type=Path, help="file to which each episode's rewards are added")
    options = parser.parse_args(arguments)
    with errors_of_one_line("mcp"):
        require_extra("mcp", "python -m agent_envs.mcp", "mcp")
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        env: gym.Env[str, str] = gym.make(options.env, tool_format="openai", **kwargs)
        session = Session(env, seed=options.seed, log=options.log)
    with contextlib.closing(session):
        asyncio.run(_serve_stdio(build_server(session, options.env)))


async def _serve_stdio(server: "Server") -> None:
    from mcp import stdio_server

    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    main()
