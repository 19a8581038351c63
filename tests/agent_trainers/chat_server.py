"""Stand-ins for servers: real HTTP on localhost, replies by a function."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


class Reply:
    """One HTTP response."""

    def __init__(self, body, status=200, headers=(), seconds=0.0):
        """Reply with `body` (JSON-able, or text) after `seconds`."""
        self.body = body if isinstance(body, str) else json.dumps(body)
        self.status, self.headers, self.seconds = status, dict(headers), seconds


def says(content, calls=(), finish_reason="stop", usage=(10, 5)):
    """A chat completion."""
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"id-{i}", "type": "function", "function": {"name": n, "arguments": arguments}}
            for i, (n, arguments) in enumerate(calls)
        ]
    prompt, completion = usage
    return Reply({
        "id": "x", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion,
                  "total_tokens": prompt + completion},
    })  # fmt: skip


def refuses(status, message, code=None, **options):
    """An error in OpenAI's form; retried at once where it is retried."""
    body = {"error": {"message": message, "code": code, "type": "error"}}
    return Reply(body, status, {"retry-after-ms": "1"}, **options)


@contextmanager
def json_server(answer):
    """Serve ``answer(path, JSON body or None for GET, headers)`` over HTTP; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._send(answer(self.path.split("?")[0], None, self.headers))

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(answer(self.path.split("?")[0], json.loads(body or b"{}"), self.headers))

        def _send(self, reply):
            payload = reply.body.encode()
            try:
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            except ConnectionError:  # the client gave up waiting
                self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def chat_server(reply):
    """Serve ``reply(body, number of the request)``; yield what the tests see of the server."""

    def answer(_, body, headers):
        with lock:
            state.bodies.append(body)
            state.headers.append({k.lower(): v for k, v in headers.items()})
            number = len(state.bodies) - 1
            state.num_active += 1
            state.max_active = max(state.max_active, state.num_active)
        try:
            said = reply(body, number)
            time.sleep(said.seconds)
        finally:
            with lock:
                state.num_active -= 1
        return said

    lock = threading.Lock()
    state = SimpleNamespace(bodies=[], headers=[], num_active=0, max_active=0, lock=lock)
    with json_server(answer) as url:
        state.url = f"{url}/v1"
        yield state
