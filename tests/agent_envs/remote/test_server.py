"""A server: OpenEnv's messages, limits, and hostile clients."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import gymnasium as gym
import pytest

pytest.importorskip("websockets", reason="the extra 'serve' is not installed")

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from agent_envs import ConfigurationError, Task, ToolEnv
from agent_envs.errors import ServerError
from agent_envs.remote.protocol import MAX_MESSAGE_BYTES, TOKEN_VARIABLE

MULTI_HOP = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def client():
    """Opens a connection; the result sends a text and returns the reply."""
    with contextlib.ExitStack() as stack:

        def open_one(served):
            url = f"ws://127.0.0.1:{served.port}/ws"
            link = stack.enter_context(connect(url, proxy=None, compression=None, close_timeout=1))

            def send(text):
                link.send(text if isinstance(text, str | bytes) else json.dumps(text))
                return json.loads(link.recv(timeout=60))

            send.link = link
            return send

        yield open_one


def status(served, **headers):
    request = urllib.request.Request(f"{served.url}/health", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def read_json(served, path, data=None):
    request = urllib.request.Request(f"{served.url}{path}", data=data)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_openenvs_tools_can_read_what_is_served(serve):
    """The criteria of ``openenv validate --url`` of openenv 0.10.0."""
    served = serve(MULTI_HOP)
    assert read_json(served, "/health") == {"status": "healthy"}
    about = read_json(served, "/metadata")
    assert (about["name"], about["description"]) == (MULTI_HOP, f"{MULTI_HOP}, with tools: search")
    schemas = read_json(served, "/schema")
    assert all(schemas[name]["type"] == "object" for name in ("action", "observation", "state"))
    ids = {b"{}": None, b'{"id": 7, "method": "x"}': 7, b'{"id": "\\ud800"}': "\ud800"}
    for body, number in {**ids, b"[" * 9000: None}.items():
        reply = read_json(served, "/mcp", body)
        assert (reply["jsonrpc"], reply["id"], reply["error"]["code"]) == ("2.0", number, -32601)
    openapi = read_json(served, "/openapi.json")
    assert openapi["info"]["version"] == "1.0.0"
    paths = {"/health", "/metadata", "/schema", "/mcp"}  # neither /reset nor /step nor /state
    assert set(openapi["paths"]) == paths


def wait_until(is_true, seconds=60.0):
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


GARBAGE = [
    ("", "INVALID_JSON"),
    ("{", "INVALID_JSON"),
    (b"\x00\xff", "INVALID_JSON"),
    ("[" * 100_000, "INVALID_JSON"),
    ('{"type": "step", "data": {"text": ' + "9" * 5_000 + "}}", "INVALID_JSON"),
    ("null", "VALIDATION_ERROR"),
    ("[1]", "VALIDATION_ERROR"),
    ('{"type": 3}', "VALIDATION_ERROR"),
    ('{"type": "fly"}', "UNKNOWN_TYPE"),
    ('{"type": "step"}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": []}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": {"text": 7}}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": {"text": "x", "more": 1}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": "1"}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": 1e400}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": -1}}', "EXECUTION_ERROR"),
    ('{"type": "reset", "data": {"turn_limit": 0}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"options": {"task": {}}}}', "EXECUTION_ERROR"),
    ('{"type": "reset", "data": {"options": {"task": 1e9}}}', "EXECUTION_ERROR"),
    ('{"type": "reset", "data": {"generator": {"state": 1}}}', "EXECUTION_ERROR"),
    ('{"type": "reset", "data": {"generator": {"bit_generator": "MT19937"}}}', "EXECUTION_ERROR"),
    ('{"type": "restore", "data": {"snapshot": ""}}', "UNKNOWN_TYPE"),
]


def test_garbage_is_refused_and_the_session_continues(serve, client, caplog):
    send = client(serve(MULTI_HOP))
    for text, code in GARBAGE:
        reply = send(text)
        assert (reply["type"], reply["data"]["code"]) == ("error", code), text[:80]
        assert "log" not in reply["data"]["message"]
    assert caplog.text == ""
    early = send({"type": "step", "data": {"text": "x"}})["data"]
    assert (early["code"], early["kind"]) == ("EXECUTION_ERROR", "ResetNeeded")
    observation, info = gym.make(MULTI_HOP).reset(seed=1)
    reply = send({"type": "reset", "data": {"seed": 1, "episode_id": "mine"}})["data"]
    assert (reply["reward"], reply["done"]) == (None, False)
    assert reply["observation"]["text"] == observation
    assert reply["observation"]["info"] == json.loads(json.dumps(info))
    reply = send('{"type": "step", "data": {"text": "\\ud800"}}')
    state = send({"type": "state"})["data"]
    assert state == {"episode_id": "mine", "task_id": info["task_id"], "step_count": 1}
    assert reply["data"]["observation"]["info"]["action"]["error"] == "no_action"
    send.link.send('{"type": "close"}')
    with pytest.raises(ConnectionClosed):
        send.link.recv(timeout=60)


def test_hostile_clients_do_not_affect_others(serve, client):
    """A frame that is too long, one that never ends, replies that are not read."""
    served = serve(MULTI_HOP)
    good = client(served)
    good({"type": "reset", "data": {"seed": 1}})
    too_long = client(served)
    with pytest.raises(ConnectionClosed):
        too_long("x" * (MAX_MESSAGE_BYTES + 1))
    half = client(served)
    half.link.socket.sendall(b"\x81\xfe\x10\x00" + b"mask" + b"x" * 10)  # of 4096 bytes
    deaf = client(served)
    for _ in range(200):
        deaf.link.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
    with socket.create_connection(("127.0.0.1", served.port)) as never_sends:
        never_sends.sendall(b"GET /ws HTTP/1.1\r\nHost")
        reply = good({"type": "step", "data": {"text": "x"}})
    assert reply["data"]["observation"]["metrics"]["num_turns"] == 1
    half.link.socket.shutdown(socket.SHUT_RDWR)


def test_sessions_end_when_they_are_idle(serve, client, remote):
    served = serve(MULTI_HOP, idle_seconds=0.5)
    env, local = remote(served), gym.make(MULTI_HOP)
    env.reset(seed=1)
    idle = client(served)
    idle({"type": "reset", "data": {}})
    with pytest.raises(ConnectionClosed, match="idle"):
        idle.link.recv(timeout=60)
    wait_until(lambda: served.num_open == 0)
    local.reset(seed=1)
    assert repr(env.step("x")) == repr(local.step("x"))  # resumed in another session


class Slow(ToolEnv):
    """Its steps wait for a test."""

    num_tasks = 3
    begun = threading.Event()
    gate = threading.Event()
    closed = threading.Event()

    def get_task(self, index):
        return Task(id=str(index), question="?", answers=("the gold answer",))

    def begin_step(self):
        if getattr(self, "num_turns", 0):
            self.begun.set()
            self.gate.wait(20)

    def close(self):
        self.closed.set()


def test_a_session_counts_until_its_environment_returns(serve, client):
    Slow.gate.clear()
    Slow.closed.clear()
    served = serve(Slow, max_sessions=1)
    send = client(served)
    send({"type": "reset", "data": {}})
    send.link.send('{"type": "step", "data": {"text": "x"}}')
    assert Slow.begun.wait(20)
    send.link.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(InvalidStatus, match="503"):
        client(served)
    Slow.gate.set()
    wait_until(lambda: served.num_open == 0)
    assert Slow.closed.is_set()


class Leaky(ToolEnv):
    """Fails with the answer in its error."""

    num_tasks = 3
    fails = True

    def get_task(self, index):
        return Task(id=str(index), question="?", answers=("the gold answer",))

    def on_answer(self, answer):
        if Leaky.fails:
            raise RuntimeError(f"{answer!r} is not {self.task.answers[0]!r}")


def test_an_environment_that_fails_is_replaced_and_its_error_stays_on_the_server(
    serve, remote, caplog
):
    env = remote(serve(Leaky))
    env.reset(seed=0)
    with pytest.raises(ServerError, match=r"RuntimeError; see the server's log") as raised:
        env.step(env.unwrapped.write_answer("x"))
    assert "gold" not in str(raised.value)
    assert "the gold answer" in caplog.text
    Leaky.fails = False
    env.step("y")  # resumes the episode
    assert env.step(env.unwrapped.write_answer("x"))[2]
    Leaky.fails = True


def test_environments_without_tools_are_refused(serve):
    with pytest.raises(ConfigurationError, match="CartPoleEnv is not an environment with tools"):
        serve("CartPole-v1")


# Secrets and permissions


def test_a_client_cannot_read_the_answer(serve, client):
    send = client(serve(Leaky, with_reference=False))
    assert "gold" not in json.dumps(send({"type": "reset", "data": {"seed": 0}}))
    assert send({"type": "reference_actions"})["data"]["code"] == "NOT_OFFERED"


def test_clients_without_the_token_and_web_pages_are_refused(serve, remote, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    served = serve(MULTI_HOP, token="the/token")
    url = f"ws://127.0.0.1:{served.port}/ws"
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "x"}):
        assert status(served, **headers) == 200  # of /health, for load balancers
        with pytest.raises(InvalidStatus, match="401"):
            connect(url, additional_headers=headers, proxy=None)
    assert served.num_open == 0
    with pytest.raises(ConfigurationError, match=f"requires a token: set {TOKEN_VARIABLE}"):
        gym.make("AgentR1/Remote-v0", url=served.url)
    monkeypatch.setenv(TOKEN_VARIABLE, "the/token")
    remote(served).reset(seed=0)
    # Browsers send an Origin header with requests of web pages.
    right = {"Authorization": "Bearer the/token"}
    assert status(served, **right, Host="any.example") == 200
    assert status(served, **right, Origin="https://evil.example") == 403
    with pytest.raises(InvalidStatus):
        connect(url, additional_headers=right, origin="https://evil.example", proxy=None)


def test_a_server_without_a_token_answers_only_to_names_of_its_machine(serve):
    served = serve(MULTI_HOP)
    assert status(served, Host=f"localhost:{served.port}") == 200
    # a web page whose name resolves to 127.0.0.1
    assert status(served, Host="evil.example") == 400
    url, headers = f"ws://127.0.0.1:{served.port}/ws", {"Host": "evil.example"}
    with pytest.raises(InvalidStatus, match="400"):
        connect(url, additional_headers=headers, proxy=None)


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x16\x03\x01\x02", id="TLS"),
        pytest.param(b"GET /ws\r\n\r\n", id="no version"),
        pytest.param(b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
                     id="half a body"),
        pytest.param(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
                     id="half a call"),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"a" * 99_999, id="a head that is too long"),
        pytest.param(UPGRADE.replace(b"localhost", b"x") + b"dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
                     id="a refused host"),
        pytest.param(UPGRADE + b"no\r\n\r\n", id="a bad key"),
        pytest.param(UPGRADE + b"dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + b"\xff" * 99, id="bad frames"),
    ],
)  # fmt: skip
def test_garbage_and_clients_that_hang_up_leave_no_log(serve, data, caplog, capfd):
    served = serve(MULTI_HOP)
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
        with connection, contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    wait_until(lambda: served.num_open == 0)
    assert status(served) == 200
    assert (caplog.text, capfd.readouterr().err) == ("", "")


def test_one_client_cannot_take_every_session(serve, client, remote):
    served = serve(MULTI_HOP, max_sessions=3)
    greedy, local = [remote(served) for _ in range(3)], gym.make(MULTI_HOP)
    for env in (*greedy, local):
        env.reset(seed=1)
    url = f"ws://127.0.0.1:{served.port}/ws"
    with connect(url, proxy=None, source_address=("127.0.0.2", 0)) as other:
        other.send('{"type": "reset", "data": {"seed": 1}}')
        assert json.loads(other.recv(timeout=60))["type"] == "observation"
        with pytest.raises(InvalidStatus, match="503"):  # the first client has one more
            client(served)
        other.send('{"type": "step", "data": {"text": "x"}}')
        assert json.loads(other.recv(timeout=60))["type"] == "observation"
    wait_until(lambda: served.num_open == 2)
    expected = local.step("x")
    assert [repr(env.step("x")) for env in greedy] == [repr(expected)] * 3  # one is resumed


def test_a_message_that_is_not_utf8_leaves_no_log(serve, caplog):
    served = serve(MULTI_HOP)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(UPGRADE + b"dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        assert b"101 Switching" in connection.recv(4096)
        connection.sendall(b"\x81\x82\0\0\0\0\xff\xfe")  # a masked text frame
        while connection.recv(4096):
            pass
    assert caplog.text == ""
