"""Clients that hold connections and do not use them: others are served."""

import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from agent_envs.errors import ConfigurationError
from agent_trainers import Gateway
from agent_trainers.gateway.connections import default_limits
from agent_trainers.policies.scripted import ScriptedPolicy

LIMIT = 8


@pytest.fixture
def gateway(scripted):
    return scripted(lambda request: "x", max_connections=LIMIT)


@pytest.fixture
def attack():
    """Opens connections, says the same on each, and keeps them."""
    with contextlib.ExitStack() as stack:

        def connect(session, said=b"", number=5 * LIMIT, wait=False):
            url = urlsplit(session.base_url)
            connections = []
            for _ in range(number):
                connection = socket.create_connection((url.hostname, url.port), timeout=10)
                connections.append(stack.enter_context(connection))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(said)
                    if wait:
                        connection.recv(4096)
            return connections

        yield connect


@contextlib.contextmanager
def client(session):
    """One connection of a well-behaved program."""
    url = urlsplit(session.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)

    def ask():
        connection.request(
            "GET", f"{url.path}/models", headers={"Authorization": f"Bearer {session.key}"}
        )
        reply = connection.getresponse()
        reply.read()
        return reply.status, connection.sock.getsockname()

    with contextlib.closing(connection):
        yield ask


def num_open(connections):
    """How many the gateway has not closed."""

    def is_open(connection):
        connection.setblocking(False)
        try:
            while connection.recv(4096):
                pass
            return False
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    return sum(map(is_open, connections))


def head(session, method, path, key=None, more=""):
    url = urlsplit(session.base_url)
    authorization = f"Authorization: Bearer {key or session.key}"
    return (
        f"{method} {url.path}/{path} HTTP/1.1\r\nHost: x\r\n{authorization}\r\n{more}\r\n".encode()
    )


def attacks(hostile):
    """What a program may say to hold a connection, and whether it waits for the answer."""
    yield "nothing", b"", False
    yield "half a head", b"GET /x HTTP/1.1\r\n", False
    yield "a wrong key", head(hostile, "GET", "models", key="none"), True
    yield "its key", head(hostile, "GET", "models"), True
    body = "Content-Length: 100\r\n"
    yield "half a request", head(hostile, "POST", "chat/completions", more=body) + b"{", False


def test_a_program_that_holds_connections_takes_them_from_itself(gateway, attack):
    honest, hostile = (gateway.open(task_id=str(i)) for i in range(2))
    for name, said, wait in attacks(hostile):
        with client(honest) as ask:
            first = ask()
            taken = attack(hostile, said, wait=wait)
            assert ask() == first == (200, first[1]), name  # on the connection that it had
            with client(honest) as another:
                assert another()[0] == 200, name
            assert num_open(taken) <= LIMIT - 1, name


def test_who_holds_less_than_others_keeps_what_it_has(gateway, attack):
    honest, *hostile = (gateway.open(task_id=str(i)) for i in range(3))
    with client(honest) as ask, client(honest) as again:
        firsts = ask(), again()
        for session in hostile:
            attack(session, head(session, "GET", "models"), wait=True)
            attack(session)
        assert (ask(), again()) == firsts


def test_a_connection_that_is_closed_makes_room(gateway, attack):
    session = gateway.open(task_id="0")
    with client(session) as ask:
        first = ask()
        for _ in range(3):
            for connection in attack(session, head(session, "GET", "models"), LIMIT - 1, wait=True):
                connection.close()
        assert ask() == first
    assert not gateway.connections._held.keys() - {"", session.id}


def test_a_call_under_way_is_not_given_up_for_who_comes(scripted, attack):
    may_answer = threading.Event()

    def act(request):
        assert may_answer.wait(60)
        return "x"

    gateway = scripted(act, max_connections=LIMIT)
    sessions = [gateway.open(task_id=str(i)) for i in range(LIMIT)]
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    length = f"Content-Length: {len(body)}\r\n"
    calls = []
    for session in sessions:
        said = head(session, "POST", "chat/completions", more=length) + body.encode()
        calls += attack(session, said, number=1)
    while not all(session._busy_keys for session in sessions):
        time.sleep(0.002)
    attack(sessions[0])
    may_answer.set()
    assert [call.recv(15) for call in calls] == [b"HTTP/1.1 200 OK"] * LIMIT


@pytest.mark.parametrize(
    ("num_files", "expected"),
    [(1024, (512, 64)), (65_536, (4096, 2048)), (resource.RLIM_INFINITY, (4096, 1024))],
)
def test_connections_leave_the_process_half_of_its_files(monkeypatch, num_files, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    assert default_limits() == expected


def test_no_connection_at_all_is_refused():
    with pytest.raises(ConfigurationError, match="max_connections"):
        Gateway(ScriptedPolicy(str), max_connections=0)
