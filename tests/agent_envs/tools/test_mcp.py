"""Tools of MCP servers in environments, with the real package, on stdio and over HTTP."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")
pytestmark = pytest.mark.filterwarnings("default")

from agent_envs import ConfigurationError, ToolEnv, tool  # noqa: E402
from agent_envs.core.tasks import Task  # noqa: E402
from agent_envs.tools.mcp import McpServer  # noqa: E402
from tests.agent_envs.tools.http_server import HttpServer  # noqa: E402

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = f"{sys.executable} {SCRIPT}"


class QuestionEnv(ToolEnv):
    """A custom environment."""

    def get_task(self, index):
        return Task(id=f"q-{index}", question="How many?", answers=("3",))


@contextlib.contextmanager
def made(server, **rest):
    with contextlib.closing(QuestionEnv(tools=[server], **rest)) as env:
        env.reset(seed=0)
        yield env


def call(env, name, /, **arguments):
    observation, _, _, _, info = env.step(env.write_call(name, **arguments))
    return observation, info["action"].get("error")


@pytest.fixture(scope="module")
def http():
    server = HttpServer([sys.executable, SCRIPT])
    yield server
    server.kill()


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request):
    url = None if request.param == "stdio" else request.getfixturevalue("http").url
    return McpServer(url or COMMAND)


@pytest.fixture(scope="module")
def env(server):
    with made(server) as env:
        yield env


@pytest.mark.parametrize(
    ("name", "arguments", "observation", "error"),
    [
        ("add", {"a": 1, "b": 2}, "3", None),
        ("fail", {}, "the disk is full", "tool_error"),
        ("structure", {}, '{"rows": [1, 2]}', None),
        ("echo", {"self": "a", "name": "b \ud800"}, "echo [('name', 'b ?'), ('self', 'a')]", None),
        ("picture", {}, "Look:\n[image: image/png]\n[audio: audio/wav]\n"
         "[resource_link: file:///log]\n[resource: file:///b]\ninside", None),
        ("bad_name__x_", {"b": 1}, "bad name/<x> [('b', 1)]", None),
        ("endless", {"x": 1}, "endless [('x', 1)]", None),
        ("doubling", {"x": 1}, "doubling [('x', 1)]", None),
        ("answer_2", {}, "answer []", None),
    ],
)  # fmt: skip
def test_the_result_of_a_server_is_the_observation(env, name, arguments, observation, error):
    assert call(env, name, **arguments) == (observation, error)


def test_schemas_and_mistakes_are_shown_to_the_model(env):
    observation, error = call(env, "add", a=1)
    assert error == "bad_arguments"
    assert "'b' is missing" in observation
    assert "'c' is not an argument" in call(env, "add", a=1, b=2, c=3)[0]
    observation, error = call(env, "refuse")  # an error of the protocol; the session lives on
    assert error == "tool_error"
    _, _, _, _, info = env.step("hm")
    names = [each["function"]["name"] for each in info["tools"]]
    assert names[:3] == ["add", "count", "slow"]
    assert "huge" not in names  # its schema is too long for any model
    assert info["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    content = call(env, "long")[0]
    assert "more characters]" in content
    assert len(content) < 10_000


def test_text_of_a_server_is_not_an_action(env):
    observation, _, terminated, _, info = env.step(env.write_call("search", query="x"))
    assert "<answer>x</answer>" in observation
    assert not terminated
    assert info["messages"][-1]["role"] == "tool"


@pytest.mark.parametrize("tool_format", ["hermes", "tags", "json", "react", "openai"])
def test_every_format_shows_and_calls_the_tools(http, tool_format):
    with made(McpServer(http.url, shared=True), tool_format=tool_format) as env:
        assert "23" in call(env, "add", a=20, b=3)[0]
        assert "endless" in env.step("")[0]  # the feedback shows an example of each


def test_each_episode_has_a_separate_session_unless_it_is_shared(http):
    server, shared = McpServer(http.url), McpServer(http.url, shared=True)
    with made(server) as env, made(server) as other:
        assert [call(env, "count")[0] for _ in range(3)] == ["1", "2", "3"]
        assert call(other, "count")[0] == "1"
        env.reset()
        assert call(env, "count")[0] == "1"
    with made(shared) as env, made(shared) as other:
        first = int(call(env, "count")[0])
        assert call(other, "count")[0] == str(first + 1)
        env.reset()
        assert call(env, "count")[0] == str(first + 2)


def test_a_server_that_dies_is_an_observation_and_starts_again():
    with made(McpServer(COMMAND)) as env:
        assert call(env, "count")[0] == "1"
        observation, error = call(env, "die")
        assert error == "tool_error"
        assert observation.startswith("The server of the tool 'die' gave no answer.")
        assert call(env, "count") == ("1", None)
        env.reset()
        assert call(env, "count") == ("1", None)


def test_a_server_that_returns_has_forgotten_its_sessions():
    server = HttpServer([sys.executable, SCRIPT])
    try:
        with made(McpServer(server.url)) as env:
            assert call(env, "count")[0] == "1"
            server.kill()
            assert call(env, "count")[1] == "tool_error"
            assert env.reset()[1]["tools"]
            server.start()
            assert call(env, "count") == ("1", None)
    finally:
        server.kill()


def test_a_timeout_is_an_observation_and_keeps_the_session(http):
    with made(McpServer(http.url, timeout=0.5)) as env:
        assert call(env, "count")[0] == "1"
        observation, error = call(env, "slow", seconds=30)
        assert error == "tool_timeout"
        assert "within 0.5 seconds" in observation
        assert call(env, "count")[0] == "2"


def test_tools_of_a_server_replace_no_other_tool(http):
    @tool
    def add(a: int, b: int) -> str:
        """Add, in the house."""
        return "ours"

    with contextlib.closing(QuestionEnv(tools=[McpServer(http.url), add])) as env:
        env.reset(seed=0)
        assert call(env, "add", a=1, b=2)[0] == "ours"
        assert call(env, "add_2", a=1, b=2)[0] == "3"


@pytest.mark.parametrize("shared", [False, True])
def test_snapshots_repeat_the_calls_unless_the_session_is_shared(http, shared):
    with made(McpServer(http.url, shared=shared)) as env:
        count = int(call(env, "count")[0])
        saved = env.snapshot()
        assert int(call(env, "count")[0]) == count + 1
        assert saved.is_replayed is not shared
        env.restore(saved)
        assert int(call(env, "count")[0]) == count + (2 if shared else 1)


def test_a_command_gets_only_the_named_variables(monkeypatch):
    monkeypatch.setenv("A_SECRET", "s3cret")
    monkeypatch.setenv("ANOTHER", "s3cret, too")
    with made(McpServer(COMMAND, pass_env=("A_SECRET",))) as env:
        assert call(env, "environment", name="A_SECRET")[0] == "s3cret"
        assert call(env, "environment", name="ANOTHER")[0] == "not set"
    with pytest.raises(ConfigurationError, match="NOT_SET"):
        QuestionEnv(tools=[McpServer(COMMAND, pass_env=("NOT_SET",))])


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("no-such-program-here", "no-such-program-here"),
        ("http://127.0.0.1:9/mcp", r"http://127\.0\.0\.1:9/mcp"),
        (f"{sys.executable} -c \"raise SystemExit('no key given')\"", "no key given"),
    ],
)
def test_an_unusable_server_is_an_error_when_the_environment_is_made(server, message):
    with pytest.raises(ConfigurationError, match=message):
        QuestionEnv(tools=[McpServer(server)])


def test_no_server_is_left_behind():
    env = QuestionEnv(tools=[McpServer(COMMAND)])
    env.reset(seed=0)
    before = len(children())
    assert before >= 1
    env.close()
    assert len(children()) == before - 1


def children():
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line == COMMAND]
