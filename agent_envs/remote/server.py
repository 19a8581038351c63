"""The server: sessions over a WebSocket, and OpenEnv's HTTP routes."""

import asyncio
import contextlib
import hmac
import json
import secrets
from base64 import b64decode
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import pydantic

from agent_envs.remote.protocol import (
    MAX_MESSAGE_BYTES,
    ErrorCode,
    Observation,
    Refusal,
    State,
    Step,
    write_refusal,
    write_reply,
)
from agent_envs.remote.session import Session, TextEnv, describe

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.websockets import WebSocket

NO_SESSION_TEXT: Final = (
    "There is no such session. POST /reset begins one, which lasts for an episode; send the "
    "observation's 'session' next to 'action'."
)
SEND_SECONDS: Final = 60.0
"""A client that does not receive a reply within this time is disconnected."""
BODY_SECONDS: Final = 30.0
REFUSAL_SECONDS: Final = 5.0
POLICY_VIOLATION: Final = 1008
GOING_AWAY: Final = 1001
_HTTP_STATUS: Final = {
    ErrorCode.CAPACITY_REACHED: 503, ErrorCode.FACTORY_ERROR: 500, ErrorCode.EXECUTION_ERROR: 500
}  # fmt: skip


class EnvironmentServer:
    """Serves one environment to many clients, each with its own session."""

    def __init__(
        self,
        make_env: Callable[[], TextEnv],
        *,
        max_sessions: int = 256,
        idle_seconds: float = 600.0,
        token: str | None = None,
        with_reference: bool = False,
    ) -> None:
        """Make the environment once, so that its errors show at once.

        Args:
            make_env: Makes an environment; called once more for each session.
            max_sessions: Maximum number of sessions. Beyond it, a new one replaces the one that has
                been between episodes for longest.
            idle_seconds: Time without a message after which a session ends.
            token: Token that clients have to send; None for none.
            with_reference: Whether clients may request the actions that solve a task.

        Raises:
            ConfigurationError: If the environment cannot be served.
        """
        self._make_env, self._with_reference = make_env, with_reference
        self._max_sessions, self._idle_seconds, self._token = max_sessions, idle_seconds, token
        self._sessions: set[Session] = set()
        self._between_episodes: dict[Session, asyncio.Timeout] = {}  # the longest first
        self._over_http: dict[str, tuple[Session, asyncio.TimerHandle]] = {}
        env = make_env()
        self.description = describe(env, with_reference=with_reference)
        self._about = " ".join((type(env.unwrapped).__doc__ or "").partition("\n\n")[0].split())
        env.close()

    def app(self) -> "ASGIApp":
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        routes = [
            WebSocketRoute("/ws", self._serve_socket),
            Route("/reset", partial(self._serve_http, "reset"), methods=["POST"]),
            Route("/step", partial(self._serve_http, "step"), methods=["POST"]),
            Route("/state", partial(self._serve_http, "state")),
            *(Route(path, _json_route(read)) for path, read in self._documents().items()),
        ]
        return _guarded(Starlette(routes=routes), self._token)

    # Over a WebSocket: a connection is a session

    async def _serve_socket(self, websocket: "WebSocket") -> None:
        from starlette.websockets import WebSocketDisconnect

        await websocket.accept()
        try:
            session = self._open()
        except Refusal as refusal:
            with contextlib.suppress(TimeoutError, WebSocketDisconnect):
                async with asyncio.timeout(REFUSAL_SECONDS):
                    await _receive(websocket)  # a client may not read before it has sent
                    await websocket.send_text(write_refusal(refusal))
                    await websocket.close()
            return
        reason = ""
        try:
            while True:
                async with asyncio.timeout(self._idle_seconds) as limit:
                    if session.is_over:
                        self._between_episodes[session] = limit
                    text = await _receive(websocket)
                self._between_episodes.pop(session, None)
                reply = await _run(session, partial(session.handle, text))
                if reply is None:
                    break
                async with asyncio.timeout(SEND_SECONDS):
                    await websocket.send_text(reply)
        except TimeoutError:
            reason = "idle"
        except WebSocketDisconnect:
            return
        finally:
            self._end(session)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await websocket.close(GOING_AWAY if reason else 1000, reason)

    def _open(self) -> Session:
        """Begin a session; at capacity, end one that is between episodes.

        Its client opens another session for its next episode.
        """
        if len(self._sessions) >= self._max_sessions:
            if not self._between_episodes:
                text = (
                    f"All {self._max_sessions} sessions are in use; raise --max_sessions or wait."
                )
                raise Refusal(ErrorCode.CAPACITY_REACHED, text)
            longest = next(iter(self._between_episodes))
            self._sessions.discard(longest)
            self._between_episodes.pop(longest).reschedule(asyncio.get_running_loop().time())
        session = Session(self._make_env, with_reference=self._with_reference)
        self._sessions.add(session)
        return session

    def _end(self, session: Session) -> None:
        """End a session; it counts until its environment has returned and is closed."""
        self._between_episodes.pop(session, None)
        loop = asyncio.get_running_loop()
        closed = session.thread.submit(session.close)
        discard = partial(self._sessions.discard, session)
        closed.add_done_callback(lambda _: loop.call_soon_threadsafe(discard))
        session.thread.stop()

    # Over HTTP: a session lasts for one episode, and requests name it

    async def _serve_http(self, kind: str, request: "Request") -> "Response":
        try:
            body = dict(request.query_params) if kind == "state" else await _read_body(request)
            name, data = body.get("session"), body.get("action") if kind == "step" else {}
            if kind == "reset":
                name, data = secrets.token_urlsafe(16), body
                self._keep(name, self._open())
            elif kind == "state" and name is None:
                blank = State(episode_id=None, task_id=None, step_count=0).model_dump()
                return _respond(write_reply("state", blank))
            if not isinstance(name, str) or name not in self._over_http:
                raise Refusal(ErrorCode.VALIDATION_ERROR, NO_SESSION_TEXT)
        except Refusal as refusal:
            return _respond(write_refusal(refusal))
        session, _ = self._over_http[name]
        message = json.dumps({"type": kind, "data": data})
        reply = await _run(session, partial(session.handle, message)) or ""
        if session.is_over or (kind == "reset" and json.loads(reply)["type"] == "error"):
            self._forget(name)
        elif name in self._over_http:
            self._keep(name, session)
        return _respond(reply, session=name)

    def _keep(self, name: str, session: Session) -> None:
        """Restart the idle time of a session."""
        if name in self._over_http:
            self._over_http[name][1].cancel()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._idle_seconds, self._forget, name)
        self._over_http[name] = session, timer

    def _forget(self, name: str) -> None:
        if name in self._over_http:
            session, timer = self._over_http.pop(name)
            timer.cancel()
            self._end(session)

    def _documents(self) -> dict[str, Callable[[], dict[str, Any]]]:
        schemas: dict[str, type[pydantic.BaseModel]]
        schemas = {"action": Step, "observation": Observation, "state": State}
        return {
            "/health": lambda: {"status": "healthy"},
            "/metadata": lambda: {
                "name": self.description["environment"],
                "description": self._about,
                "version": version("agent-r1"),
            },
            "/schema": lambda: {name: kind.model_json_schema() for name, kind in schemas.items()},
            "/describe": lambda: self.description,
            "/capacity": lambda: {
                "active_sessions": len(self._sessions) - len(self._between_episodes),
                "open_sessions": len(self._sessions),
                "max_sessions": self._max_sessions,
                "fingerprint": self.description["fingerprint"],
            },
        }


def listen(
    server: EnvironmentServer, host: str, port: int
) -> "tuple[uvicorn.Server, socket.socket, str]":
    """Listen at an address; ``run(sockets=[socket])`` of the returned server then serves."""
    import uvicorn

    config = uvicorn.Config(
        server.app(), host=host, port=port, ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # a short compressed message could expand to a long one
        lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=5,
    )  # fmt: skip
    bound = config.bind_socket()
    bound.listen()  # so that clients can connect as soon as the URL is returned
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return uvicorn.Server(config), bound, url


def _json_route(read: Callable[[], dict[str, Any]]) -> Any:
    from starlette.responses import JSONResponse

    async def respond(_: "Request") -> "Response":
        return JSONResponse(read())

    return respond


async def _run(session: Session, function: Callable[[], Any]) -> Any:
    """Run a function in the session's thread; it completes even if the caller is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(session.thread.submit(function)))


async def _receive(websocket: "WebSocket") -> str:
    """Return the next message; of a binary one '', which is not JSON."""
    from starlette.websockets import WebSocketDisconnect

    event = await websocket.receive()
    if event["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(event.get("code", 1000))
    return event.get("text") or ""


async def _read_body(request: "Request") -> dict[str, Any]:
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_MESSAGE_BYTES:
                    raise Refusal(ErrorCode.VALIDATION_ERROR, "The body is too long.")
        data = json.loads(body or b"{}")
    except (ValueError, RecursionError, TimeoutError) as error:
        raise Refusal(ErrorCode.INVALID_JSON, f"Invalid JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(ErrorCode.VALIDATION_ERROR, "The body must be a JSON object.")
    return data


def _respond(reply: str, session: str | None = None) -> "Response":
    """Return a reply as OpenEnv's HTTP routes do: its data, with errors as a status."""
    from starlette.responses import Response

    message = json.loads(reply)
    data, status = message["data"], 200
    if message["type"] == "error":
        status = _HTTP_STATUS.get(data["code"], 422)
    elif message["type"] == "observation":
        data["observation"]["session"] = session
    return Response(json.dumps(data), status, media_type="application/json")


def _guarded(app: "Starlette", token: str | None) -> "ASGIApp":
    """Refuse requests without the token, and those of web pages, which have an Origin header."""
    from starlette.requests import HTTPConnection
    from starlette.responses import JSONResponse

    async def guard(scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        connection = HTTPConnection(scope)
        is_authorized = token is None or _has_token(connection, token)
        if is_authorized and "origin" not in connection.headers:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            text = "web pages are refused" if is_authorized else "a token is required"
            await JSONResponse({"message": text}, 403 if is_authorized else 401)(
                scope, receive, send
            )

    return guard


def _has_token(connection: "HTTPConnection", token: str) -> bool:
    """Return whether a request has the token, as a bearer or as the password of a URL."""
    kind, _, given = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        with contextlib.suppress(ValueError):
            given = b64decode(given).decode().partition(":")[2]
    return hmac.compare_digest(given.encode(), token.encode())
