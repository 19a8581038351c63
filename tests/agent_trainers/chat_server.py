"""A stand-in for an OpenAI-compatible server: real HTTP on localhost, replies by a function."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
            {
                "id": f"id-{i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
    prompt, completion = usage
    return Reply(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
    )


def refuses(status, message, code=None, **options):
    """An error in OpenAI's form; retried at once where it is retried."""
    body = {"error": {"message": message, "code": code, "type": "error"}}
    return Reply(body, status, {"retry-after-ms": "1"}, **options)


class ChatServer:
    """What the tests see of the server."""

    def __init__(self, url):
        """Start counting."""
        self.url = url
        self.bodies, self.headers = [], []
        self.num_active = self.max_active = 0
        self.lock = threading.Lock()


@contextmanager
def chat_server(reply):
    """Serve ``reply(body, number of the request)``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.bodies.append(body)
                state.headers.append({k.lower(): v for k, v in self.headers.items()})
                number = len(state.bodies) - 1
                state.num_active += 1
                state.max_active = max(state.max_active, state.num_active)
            try:
                answer = reply(body, number)
                time.sleep(answer.seconds)
            finally:
                with state.lock:
                    state.num_active -= 1
            payload = answer.body.encode()
            try:
                self.send_response(answer.status)
                for name, value in {"Content-Type": "application/json", **answer.headers}.items():
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
    state = ChatServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
