"""Environments as MCP servers: episodes of a session, and the real protocol around them."""

import importlib.util
import json
import sys

import anyio
import gymnasium as gym
import pytest

from agent_envs import ToolEnv
from agent_envs.core.tasks import Task
from agent_envs.mcp import ANSWER, BEGIN, FAILED_TEXT, NO_TURNS_TEXT, OVER_TEXT, Session, main

ID = "AgentR1/SyntheticMultiHop-v0"
needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="the extra mcp is not installed"
)


def make(tmp_path, env_id=ID, **kwargs):
    env = gym.make(env_id, tool_format="openai", **kwargs)
    return Session(env, seed=3, log=tmp_path / "log.jsonl")


def logged(tmp_path):
    return [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]


def play(session, env):
    """Solve the task with the twin's reference actions; return the replies."""
    replies = []
    for action in env.unwrapped.reference_actions():
        parsed = env.unwrapped.action_format.parse(action, env.unwrapped.tools)
        if parsed.kind == "answer":
            replies.append(session.call(ANSWER, {"answer": parsed.answer}))
        else:
            replies.append(session.call(parsed.name, parsed.arguments))
    return replies


def test_a_session_runs_the_episode_of_the_environment(tmp_path):
    session, twin = make(tmp_path), gym.make(ID, tool_format="openai")
    question, _ = twin.reset(seed=3)
    assert session.call(BEGIN, {}).text == question
    expected = [twin.step(action) for action in twin.unwrapped.reference_actions()]
    twin.reset(seed=3)
    replies = play(session, twin)
    assert [reply.text for reply in replies[:-1]] == [step[0] for step in expected[:-1]]
    assert replies[-1].text == OVER_TEXT
    assert not any(reply.is_error for reply in replies)
    (row,) = logged(tmp_path)
    assert row["return"] == pytest.approx(sum(step[1] for step in expected))
    assert row["metrics"]["success"] == 1.0
    assert row["end"] == "terminated"
    shown = " ".join(reply.text for reply in replies) + json.dumps(session.tools)
    for hidden in ("reward", *row["reward_terms"]):  # clients do not see rewards
        assert hidden not in shown
    tools = {tool["name"]: tool for tool in session.tools}
    assert list(tools) == [BEGIN, ANSWER, "search"]
    assert tools["search"]["input_schema"]["required"] == ["query"]
    assert session.call("search", {"query": "x"}).text == OVER_TEXT
    assert session.call(BEGIN, {}).text == twin.reset()[0]  # the next draw


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("search", {}), ("serch", {"query": "x"}), ("search", {"query": 3, "self": 1}), (ANSWER, {}),
     (ANSWER, {"answer": 3}), (BEGIN, {"task": "x"}), (BEGIN, {"task": -1}),
     (BEGIN, {"task": True})],
)  # fmt: skip
def test_a_mistake_is_an_error_reply(tmp_path, name, arguments):
    reply = make(tmp_path).call(name, arguments)
    assert reply.is_error
    assert reply.text


def test_an_episode_ends_with_its_turns_or_when_a_new_task_gives_it_up(tmp_path):
    session, twin = make(tmp_path), gym.make(ID, tool_format="openai")
    session.call("search", {"query": "film"})
    assert session.call(BEGIN, {"task": 5}).text == twin.reset(options={"task": 5})[0]
    session.call(BEGIN, {"task": 6})  # nothing was done in the one before
    replies = [session.call("search", {"query": "film"}) for _ in range(4)]
    assert replies[-1].text.endswith(NO_TURNS_TEXT)
    session.call("search", {"query": "film"})
    session.close()
    assert [row["end"] for row in logged(tmp_path)] == ["given_up", "truncated"]


class BrokenEnv(ToolEnv):
    def get_task(self, index):
        return Task(id="t", question="?", answers=())

    def on_answer(self, answer):
        raise RuntimeError("/a/secret/path")


def test_a_failing_environment_ends_the_episode_and_reveals_nothing(tmp_path):
    session = Session(BrokenEnv(tool_format="openai"), seed=0, log=tmp_path / "log.jsonl")
    assert session.call(ANSWER, {"answer": "x"}).text == FAILED_TEXT
    assert session.call(ANSWER, {"answer": "x"}).text == OVER_TEXT
    assert session.call(BEGIN, {}).text == "?"


COMMAND = [sys.executable, "-m", "agent_envs.mcp", ID, "--seed", "3"]


@needs_mcp
@pytest.mark.filterwarnings("default")
def test_the_official_client_solves_a_task():
    import mcp

    twin = gym.make(ID, tool_format="openai")
    question, _ = twin.reset(seed=3)
    *calls, answer = [
        twin.unwrapped.action_format.parse(action, twin.unwrapped.tools)
        for action in twin.unwrapped.reference_actions()
    ]

    async def play(server):
        async with mcp.Client(server) as client, anyio.create_task_group() as group:
            group.cancel_scope.deadline = anyio.current_time() + 60
            assert [tool.name for tool in (await client.list_tools()).tools][:2] == [BEGIN, ANSWER]
            begun = await client.call_tool(BEGIN)
            assert begun.content[0].text == question
            for call in calls:
                result = await client.call_tool(call.name, dict(call.arguments))
                assert not result.is_error
            assert (await client.call_tool("serch", {})).is_error
            result = await client.call_tool(ANSWER, {"answer": answer.answer})
            assert result.content[0].text in (OVER_TEXT, NO_TURNS_TEXT)

    command = mcp.StdioServerParameters(command=COMMAND[0], args=COMMAND[1:])
    anyio.run(play, command)


@needs_mcp
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["AgentR1/None-v0"], "mcp: "), ([ID, "--env_kwargs", "3"], "must be a JSON object")],
)  # fmt: skip
def test_wrong_arguments_are_errors_of_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)
