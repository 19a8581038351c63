"""Clients that die, programs that never end, policies that fail: other sessions continue."""

import contextlib
import gc
import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from agent_trainers import Gateway
from agent_trainers.gateway import SessionLimits, application
from agent_trainers.gateway.session import SessionClosedError
from agent_trainers.policies.policy import ScriptedPolicy, WaveStream
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.gateway.programs import client_of
from tests.agent_trainers.made import request

USER = [{"role": "user", "content": "hello"}]
NUM_SESSIONS, NUM_CALLS = 32, 6


def ask(session, **options):
    return client_of(session).chat.completions.create(model="any", messages=USER, **options)


def send(session, body, length):
    """Open a connection and send a request on it, whose head names a length of the body."""
    url = urlsplit(session.base_url)
    connection = socket.create_connection((url.hostname, url.port), timeout=60)
    connection.sendall(
        f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: "
        f"Bearer {session.key}\r\nContent-Length: {length}\r\n\r\n{body}".encode()
    )
    return connection


class Gate:
    """A policy that waits for a test before it answers."""

    def __init__(self):
        self.is_open, self.num_asked = threading.Event(), 0

    def __call__(self, request):
        self.num_asked += 1
        assert self.is_open.wait(60)
        return "at last"


def wait_until(claim):
    deadline = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_no_episode_is_lost_or_mixed_when_clients_die(scripted):
    limits = SessionLimits(max_calls=NUM_CALLS)
    gateway = scripted(lambda r: f"I heard {r.messages[-1]['content']}", limits=limits)
    sessions = [gateway.open(task_id=f"word-{i}") for i in range(NUM_SESSIONS)]
    rng, ended = random.Random(3), set()
    last_calls = [rng.randrange(NUM_CALLS) if i % 2 else None for i in range(NUM_SESSIONS)]

    def run(session, last_call):
        url, messages = urlsplit(session.base_url), []
        with contextlib.closing(http.client.HTTPConnection(url.netloc, timeout=60)) as connection:
            for number in range(NUM_CALLS):
                messages.append({"role": "user", "content": f"{session.task_id} {number}"})
                body = json.dumps({"model": "any", "messages": messages})
                headers = {"Authorization": f"Bearer {session.key}"}
                connection.request("POST", f"{url.path}/chat/completions", body, headers)
                if number == last_call:
                    return
                message = json.loads(connection.getresponse().read())["choices"][0]["message"]
                assert message["content"] == f"I heard {session.task_id} {number}"
                messages.append(message)
        ended.add(session.task_id)

    with ThreadPoolExecutor(NUM_SESSIONS) as pool:
        list(pool.map(run, sessions, last_calls))
    assert ended == {session.task_id for session in sessions[::2]}
    for session, last_call in zip(sessions, last_calls, strict=True):
        trajectory = session.close(1.0)
        actions = [step.action for step in trajectory.transitions]
        heard = [f"I heard {session.task_id} {i}" for i in range(NUM_CALLS)]
        assert actions == heard[: len(actions)]
        # the turn that nobody received may have been sampled
        assert len(actions) in ((NUM_CALLS,) if last_call is None else (last_call, last_call + 1))
        said = {m["content"].split()[-2] for s in trajectory.transitions for m in s.messages}
        assert said <= {session.task_id}
    assert not gateway.sessions
    wait_until(lambda: not gateway._running)


def test_a_call_is_cancelled_when_its_client_disconnects(scripted, caplog):
    gate = Gate()
    gateway = scripted(gate)
    session, other = (gateway.open(task_id=str(i)) for i in range(2))
    body = json.dumps({"model": "any", "messages": USER})
    with send(session, body, len(body)):
        wait_until(lambda: gate.num_asked == 1)
    wait_until(lambda: not session._busy_keys)
    gate.is_open.set()
    assert ask(other).choices[0].message.content == "at last"
    assert ask(session).choices[0].message.content == "at last"
    assert len(session.close(1.0).transitions) == 1
    gc.collect()
    assert not caplog.records


def test_closing_a_session_ends_its_calls(scripted):
    gate = Gate()
    session = scripted(gate).open(task_id="0")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(ask, session)
        wait_until(lambda: gate.num_asked == 1)
        trajectory = session.close(1.0)
        gate.is_open.set()
    assert call.exception().status_code == 403
    assert trajectory.transitions == []
    assert not trajectory.is_scorable
    with pytest.raises(SessionClosedError):
        session.reward(1.0)


def test_a_call_that_takes_too_long_is_cancelled(scripted):
    gate = Gate()
    gateway = scripted(gate)
    limits = SessionLimits(call_timeout_seconds=0.05, max_tokens=1)
    session, other = gateway.open(task_id="0", limits=limits), gateway.open(task_id="1")
    with pytest.raises(openai.InternalServerError, match="took longer than"):
        ask(session)
    with pytest.raises(openai.InternalServerError, match="took longer than"):
        ask(session)  # the cancelled turn used none of the session's tokens
    gate.is_open.set()
    assert ask(other)
    trajectory = session.close(1.0)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert not trajectory.is_scorable


def test_too_many_concurrent_calls_are_to_be_retried(scripted):
    gate = Gate()
    session = scripted(gate, limits=SessionLimits(max_concurrent_calls=2)).open(task_id="0")
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(ask, session) for _ in range(2)]
        wait_until(lambda: len(session._busy_keys) == 2)
        with pytest.raises(openai.RateLimitError):
            ask(session)
        gate.is_open.set()
    assert all(call.result() for call in calls)
    assert ask(session)
    assert len(session.close(1.0).transitions) == 3


def test_a_failing_policy_fails_its_calls_only(scripted, caplog):
    answers = iter([MemoryError("no memory"), "better"])

    def act(request):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    gateway = scripted(act)
    failed, recovered = (gateway.open(task_id=str(i)) for i in range(2))
    with pytest.raises(openai.InternalServerError, match="MemoryError: no memory"):
        ask(failed)
    assert ask(recovered).choices[0].message.content == "better"
    trajectory = failed.close(1.0)
    assert trajectory.stop_reason is StopReason.POLICY_ERROR
    assert "no memory" in trajectory.error
    assert "The policy failed" in caplog.text
    assert recovered.close(1.0).is_scorable


def test_a_closed_gateway_refuses_running_and_new_calls():
    class Silent(WaveStream):
        def advance(self):
            time.sleep(0.002)
            return []

    class Never(ScriptedPolicy):
        def open_stream(self):
            return Silent(self.generate)

    with ThreadPoolExecutor() as pool, Gateway(Never(str)) as gateway:
        session = gateway.open(task_id="0")
        call = pool.submit(ask, session)
        wait_until(lambda: session._busy_keys)
    assert isinstance(call.exception(), openai.OpenAIError)
    with pytest.raises(SessionClosedError):
        gateway.open(task_id="0")
    assert session.close(1.0).stop_reason is StopReason.POLICY_ERROR


def test_a_call_that_generate_left_unfinished_is_answered_by_the_next_one(policy):
    with Gateway(policy, in_thread=False) as gateway:
        session, replies = gateway.open(task_id="0"), []
        program = threading.Thread(target=lambda: replies.append(ask(session)), daemon=True)
        program.start()
        gateway.generate(lambda: session.idle_seconds > 0 or gateway._running == {})
        assert not replies
        until = time.monotonic() + 60
        gateway.generate(lambda: program.is_alive() and time.monotonic() < until)
        assert len(replies) == 1
        assert len(session.close(1.0).transitions) == 1


def test_an_incomplete_request_is_a_client_error(scripted):
    limits = SessionLimits(call_timeout_seconds=0.2)
    session = scripted(lambda r: "x", limits=limits).open(task_id="0")
    with send(session, "{", 100) as connection:
        assert connection.recv(12) == b"HTTP/1.1 408"
    assert session.close().stop_reason is StopReason.ENVIRONMENT_ERROR


def test_collective_generation_continues_while_any_process_has_episodes():
    rounds = []

    class Collective(ScriptedPolicy):
        def generate(self, requests):
            rounds.append(len(requests))
            return super().generate(requests)

    with Gateway(Collective(lambda r: "x"), in_thread=False) as gateway:
        others = iter([True, True, True, True, False])
        # this process has nothing to do; the others take two rounds
        gateway.generate(lambda: False, lambda is_active: is_active or next(others))
    assert rounds == [0, 0]


def test_a_session_that_encodes_a_long_state_delays_no_other(scripted):
    gate, encodes = threading.Event(), []

    class Slow(ScriptedPolicy):
        def encode(self, request):
            if request.messages[-1]["content"] == "long":
                encodes.append(request)
                assert gate.wait(60)
            return super().encode(request)

    with Gateway(Slow(lambda r: "x")) as gateway:
        slow, other = (gateway.open(task_id=str(i)) for i in range(2))
        body = json.dumps({"messages": [{"role": "user", "content": "long"}]})
        with send(slow, body, len(body)), send(slow, body, len(body)):
            wait_until(lambda: encodes)
            assert ask(other, timeout=20).choices[0].message.content == "x"
            assert len(encodes) == 1  # a session encodes one state at a time
            gate.set()
            wait_until(lambda: len(slow._turns) == 2)


def test_a_state_that_cannot_fit_is_not_encoded(policy, monkeypatch):
    monkeypatch.setattr(policy._renderer, "prompt_ids", None)
    assert policy.encode(request(content="amber " * 100_000)) is None


def test_a_stream_is_kept_alive_until_its_turn_ends(scripted, monkeypatch):
    monkeypatch.setattr(application, "HEARTBEAT_SECONDS", 0.05)
    gate = Gate()
    session = scripted(gate, max_connections=4).open(task_id="0")
    body = json.dumps({"messages": USER, "stream": True})
    with send(session, body, len(body)) as connection:
        received = b""
        while received.count(b": the turn has not ended") < 3:
            received += connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 200")
        assert b"data" not in received
        for _ in range(8):  # the connection is in use, so others are closed
            send(session, "", 0).close()
        gate.is_open.set()
        while b"[DONE]" not in received:
            received += connection.recv(4096)
        assert b"at last" in received
    assert len(session.close(1.0).transitions) == 1


def test_a_turn_that_fails_after_a_heartbeat_is_an_event(scripted, monkeypatch):
    monkeypatch.setattr(application, "HEARTBEAT_SECONDS", 0.05)
    limits, gate = SessionLimits(call_timeout_seconds=0.3), Gate()
    session = scripted(gate, limits=limits).open(task_id="0")
    with pytest.raises(openai.APIError, match="took longer than"):
        list(ask(session, stream=True))
    assert session.close(1.0).stop_reason is StopReason.TIMEOUT
    gate.is_open.set()


def test_garbage_leaves_no_log(scripted, caplog, capfd):
    session = scripted(lambda r: "x").open(task_id="0")
    url = urlsplit(session.base_url)
    for data in (b"\x16\x03\x01", b"GET /\r\n\r\n", b"A: " + b"x" * 99_999):
        connection = socket.create_connection((url.hostname, url.port), timeout=10)
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert ask(session)
    assert (caplog.text, capfd.readouterr().err) == ("", "")
