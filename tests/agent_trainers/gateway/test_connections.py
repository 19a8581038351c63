"""Clients that open connections and do not use them do not affect others."""

import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from agent_envs.remote.http_server import default_limit

LIMIT = 8


@pytest.fixture
def gateway(scripted):
    return scripted(lambda request: "x", max_connections=LIMIT)


@pytest.fixture
def attack():
    """Opens connections, sends the same on each, and keeps them."""
    with contextlib.ExitStack() as stack:

        def connect(session, data=b"", number=5 * LIMIT, wait=False):
            url = urlsplit(session.base_url)
            connections = []
            for _ in range(number):
                connection = socket.create_connection((url.hostname, url.port), timeout=10)
                connections.append(stack.enter_context(connection))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(data)
                    if wait:
                        connection.recv(4096)
            return connections

        yield connect


@contextlib.contextmanager
def client(session):
    """One connection of a well-behaved program."""
    url = urlsplit(session.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)

    def get():
        connection.request(
            "GET", f"{url.path}/models", headers={"Authorization": f"Bearer {session.key}"}
        )
        reply = connection.getresponse()
        reply.read()
        return reply.status, connection.sock.getsockname()

    with contextlib.closing(connection):
        yield get


def num_open(connections):
    """Return how many the gateway has not closed."""

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
    """Yield requests that keep a connection open, and whether to wait for the answer."""
    yield "nothing", b"", False
    yield "half a head", b"GET /x HTTP/1.1\r\n", False
    yield "a wrong key", head(hostile, "GET", "models", key="none"), True
    yield "its key", head(hostile, "GET", "models"), True
    body = "Content-Length: 100\r\n"
    yield "half a request", head(hostile, "POST", "chat/completions", more=body) + b"{", False


def test_a_program_with_many_connections_loses_its_own(gateway, attack):
    honest, hostile = (gateway.open(task_id=str(i)) for i in range(2))
    for name, data, wait in attacks(hostile):
        with client(honest) as get:
            first = get()
            taken = attack(hostile, data, wait=wait)
            assert get() == first == (200, first[1]), name  # on the connection that it had
            with client(honest) as another:
                assert another()[0] == 200, name
            assert num_open(taken) <= LIMIT - 1, name


def test_a_client_with_few_connections_keeps_them(gateway, attack):
    honest, *hostile = (gateway.open(task_id=str(i)) for i in range(3))
    with client(honest) as get, client(honest) as again:
        firsts = get(), again()
        for session in hostile:
            attack(session, head(session, "GET", "models"), wait=True)
            attack(session)
        assert (get(), again()) == firsts


def test_closed_connections_do_not_count(gateway, attack):
    session = gateway.open(task_id="0")
    with client(session) as get:
        first = get()
        for _ in range(3):
            for connection in attack(session, head(session, "GET", "models"), LIMIT - 1, wait=True):
                connection.close()
        assert get() == first


def test_running_calls_are_not_dropped_for_new_connections(scripted, attack):
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
        data = head(session, "POST", "chat/completions", more=length) + body.encode()
        calls += attack(session, data, number=1)
    while not all(session._busy_keys for session in sessions):
        time.sleep(0.002)
    attack(sessions[0])
    may_answer.set()
    assert [call.recv(15) for call in calls] == [b"HTTP/1.1 200 OK"] * LIMIT


def test_the_default_limit_leaves_half_of_the_file_descriptors(monkeypatch):
    for files, expected in ((1024, 512), (65_536, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))  # noqa: B023
        assert default_limit() == expected
