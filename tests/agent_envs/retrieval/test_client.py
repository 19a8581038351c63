"""The client of retrieval servers, and failures between them."""

import contextlib
import gzip
import json
import socket
import threading
import time

import gymnasium as gym
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from agent_envs import ConfigurationError, DataError, ToolError
from agent_envs.retrieval import Corpus, Passage, RetrievalClient, build_retriever
from agent_envs.retrieval.client import REFUSED_TEXT, UNAVAILABLE_TEXT
from agent_envs.tools.search import MAX_QUERY_CHARS

PASSAGES = [
    Passage("Oslo", "Oslo is the capital of Norway."),
    Passage("Bergen", "Bergen is a city in Norway.\nIt rains."),
    Passage("Café \ud800", "Serves coffee, 東京 and half a pair \udfff."),
]
LOCAL = build_retriever(Corpus(PASSAGES))


@contextlib.contextmanager
def serving(app, **options):
    """Serve an app in a thread; yield the URL."""
    config = uvicorn.Config(app, port=0, log_level="critical", access_log=False, **options)
    server, listening = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def url():
    async def retrieve(request):
        body = await request.json()
        (query,), result = body["queries"], []
        for hit in LOCAL.search(query, body["topk"]):
            contents = f"{hit.passage.title}\n{hit.passage.text}"
            document = {"id": str(hit.index), "contents": contents}
            result.append({"document": document, "score": hit.score})
        return Response(json.dumps({"result": [result]}))

    with serving(Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])) as url:
        yield url


def test_a_client_finds_what_the_server_finds(url):
    client = RetrievalClient(f"{url}/retrieve")
    for query in ("capital of Norway", "", "東京 \ud800", "x" * MAX_QUERY_CHARS):
        assert client.search(query, 2) == LOCAL.search(query, 2)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Where is Oslo?", "golden_answers": ["Norway"]}))
    return str(path)


def make(data, retriever, **rest):
    return gym.make("AgentR1/NaturalQuestions-v0", data=data, retriever=retriever, top_k=2, **rest)


def test_an_environment_searches_a_server_by_its_url(url, questions):
    env, twin = make(questions, url), make(questions, LOCAL)
    call = env.unwrapped.write_call("search", query="capital of Norway")
    for each in (env, twin):
        each.reset(seed=0)
        observation, *_ = each.step(call)
        assert observation.startswith("[1] Oslo\n")
    assert env.step(call)[0] == twin.step(call)[0]
    assert not env.unwrapped.is_immediate  # so that rollouts wait for several at once
    assert twin.unwrapped.is_immediate


GARBAGE = [
    b"", b"[" * 100_000, b'{"result": []}', b'{"result": ["x"]}', b'{"result": [{"a": 1}]}',
    b'{"result": [[{"document": {"contents": 3}, "score": 1}]]}', b"\xff\xfe",
    b'{"result": [[{"document": {"contents": "a"}, "score": NaN}]]}',
    b'{"result": [[{"document": {"contents": "a"}, "score": 1' + b"0" * 400 + b"}]]}",
]  # fmt: skip


@contextlib.contextmanager
def answering(*answers, **more):
    """Serve a sequence of answers; yield the URL and the list of requests."""

    async def app(scope, receive, send):
        status, body = answers[min(len(asked), len(answers) - 1)]
        asked.append(scope["path"])
        named = {"content-length": str(len(body)), **more}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    asked = []
    with serving(app, lifespan="off") as url:
        yield url, asked


REFUSAL = (422, b"")


def test_an_invalid_long_or_compressed_answer_is_retried(monkeypatch):
    monkeypatch.setattr("agent_envs.retrieval.client._PAUSE_SECONDS", 0.001)
    invalid = [*((200, body) for body in GARBAGE), (500, b""), (404, b"[]")]
    answer = b'{"result": [[]]}'
    for limit, answers, headers in (
        (2**24, invalid, {}),
        (100, [(200, answer + b" " * 1_000)], {}),
        (2**24, [(200, gzip.compress(answer))], {"content-encoding": "gzip"}),
    ):
        monkeypatch.setattr("agent_envs.retrieval.client.MAX_ANSWER_BYTES", limit)
        with answering(*answers, REFUSAL, **headers) as (url, asked):
            with pytest.raises(ToolError, match="does not take this query"):
                RetrievalClient(url).search("oslo", 1)
            assert asked == ["/retrieve"] * (len(answers) + 1)


def test_a_server_whose_head_never_ends_times_out():
    ended = threading.Event()

    def go_on(listening):
        connection, _ = listening.accept()
        with contextlib.suppress(OSError):
            while not ended.wait(0.01):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=go_on, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ToolError, match="not available"):
            RetrievalClient(url, timeout_seconds=0.3).search("oslo", 1)
    ended.set()


def test_a_failing_server_is_an_observation(questions):
    with answering((200, b"<html>")) as (url, _):
        env = make(questions, RetrievalClient(url, timeout_seconds=0.3))
        env.reset(seed=0)
        call = env.unwrapped.write_call("search", query="oslo")
        observation, _, terminated, _, info = env.step(call)
        assert observation == UNAVAILABLE_TEXT
        assert info["action"]["error"] == "tool_error"
        assert not terminated
    with answering(REFUSAL) as (url, _):
        env = make(questions, RetrievalClient(url))
        env.reset(seed=0)
        assert env.step(env.unwrapped.write_call("search", query="oslo"))[0] == REFUSED_TEXT


def test_the_client_checks_its_url():
    client = RetrievalClient("http://127.0.0.1:9", timeout_seconds=0.2)
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9 does not answer"):
        client.check()
    with pytest.raises(ConfigurationError, match="url"):
        RetrievalClient("127.0.0.1:9")
