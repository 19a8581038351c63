"""The server: one environment for many clients, each with a session over a WebSocket."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from agent_envs.core.async_bridge import Worker
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ActionTypeError, ConfigurationError
from agent_envs.remote.openenv_routes import openenv_routes
from agent_envs.remote.protocol import (
    KNOWN_ERRORS,
    MAX_MESSAGE_BYTES,
    Refusal,
    Reset,
    read_message,
    write_message,
)
from agent_envs.wrappers.awaited import awaited

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.websockets import WebSocket

TextEnv = gym.Env[str, str]
Reply = tuple[str, dict[str, Any]]
_CALLER_ERRORS: Final = (ActionTypeError, ConfigurationError, gym.error.Error)
"""Errors for wrong arguments, after which an environment is still usable."""
_NUM_COMPARED: Final = 4
"""First states by which clients find that two servers do not serve the same."""
_log = logging.getLogger(__name__)


class Session:
    """One environment for one client, whose messages are processed in a separate thread."""

    deadline: asyncio.Timeout | None = None
    """The end of its idle time; None while it processes a message."""

    def __init__(
        self, make_env: Callable[[], TextEnv], description: Mapping[str, Any], client: str = ""
    ) -> None:
        """Start without an environment; the first reset makes it. `client` is an address."""
        self.thread, self.client = Worker(), client
        self._make_env, self._description = make_env, description
        self._made: TextEnv | None = None
        self._env: TextEnv | None = None
        self._state: dict[str, Any] = {"episode_id": None, "task_id": None, "step_count": 0}

    def handle(self, text: str) -> str | None:
        """Process a message and return the reply; None for ``close``."""
        kind = ""
        try:
            kind, data = read_message(text)
            return None if kind == "close" else write_message(*self._process(kind, data))
        except Refusal as refusal:
            error = {"message": str(refusal), "code": refusal.code, "kind": refusal.kind}
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - logged, or told to the caller
            name, message = type(failure).__name__, str(failure)
            if not isinstance(failure, _CALLER_ERRORS):
                # Foreign code failed in an unknown state: the next episode gets a new environment.
                _log.warning("An environment failed at a %s message.", kind, exc_info=True)
                self.close()
                message = message if name in KNOWN_ERRORS else f"{name}; see the server's log."
            error = {"message": message, "code": "EXECUTION_ERROR", "kind": name}
        return write_message("error", error)

    def close(self) -> None:
        """Close the environment."""
        env, self._made, self._env = self._made, None, None
        try:
            if env is not None:
                env.close()
        except (Exception, SystemExit):  # noqa: BLE001 - foreign code; its episodes are over
            _log.warning("An environment failed to close.", exc_info=True)

    def _process(self, kind: str, data: Any) -> Reply:
        if kind == "describe":
            return kind, dict(self._description)
        if kind == "state":
            return kind, self._state
        if kind == "reset":
            return self._observation(*self._reset(data))
        if self._env is None:
            raise gym.error.ResetNeeded("No episode has begun in this session; send a reset first.")
        if kind == "step":
            observation, reward, terminated, truncated, info = self._env.step(data.text)
            self._state["step_count"] += 1
            return self._observation(observation, float(reward), terminated, truncated, info)
        if not self._description["with_reference"]:
            text = "The server does not offer its solutions; start it with --reference."
            raise Refusal("NOT_OFFERED", text, "NotImplementedError")
        env: Any = self._env.unwrapped
        return kind, {"actions": list(env.reference_actions())}

    def _reset(self, data: Reset) -> tuple[str, None, bool, bool, dict[str, Any]]:
        if self._made is None:
            self._made = awaited(self._make_env())
        limit = data.turn_limit
        self._env = self._made if limit is None else TimeLimit(self._made, limit)
        if data.generator is not None:
            try:
                self._made.unwrapped.np_random.bit_generator.state = data.generator
            except (ValueError, TypeError, LookupError, OverflowError) as error:
                raise ConfigurationError(f"generator: not a state of PCG64 ({error}).") from None
        observation, info = self._env.reset(seed=data.seed, options=data.options)
        self._state = {"episode_id": data.episode_id, "task_id": info["task_id"], "step_count": 0}
        return observation, None, False, False, info

    def _observation(
        self, text: str, reward: float | None, terminated: bool, truncated: bool, info: Any
    ) -> Reply:
        base: Any = self._made and self._made.unwrapped
        observation = {
            "text": text, "info": info, "terminated": bool(terminated),
            "truncated": bool(truncated), "metrics": base.metrics(),
            "task_index": base.task_index, "generator": base.np_random.bit_generator.state,
        }  # fmt: skip
        is_over = bool(terminated or truncated)
        return "observation", {"observation": observation, "reward": reward, "done": is_over}


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
            max_sessions: Maximum number of sessions. Beyond it, a client with fewer sessions than
                another ends an idle one of that client; all others are refused.
            idle_seconds: Time without a message after which a session ends.
            token: Token that clients have to send; None for none.
            with_reference: Whether clients may request the actions that solve a task.
        """
        self._make_env, self._max_sessions = make_env, max_sessions
        self._idle_seconds, self.token = idle_seconds, token
        self._sessions: set[Session] = set()
        env = awaited(make_env())
        self.description = _describe(env, with_reference=with_reference)
        env.close()

    def app(self) -> "ASGIApp":
        """Return the ASGI application: ``/ws`` for sessions, and what OpenEnv's tools read."""
        from starlette.applications import Starlette
        from starlette.requests import HTTPConnection
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route, WebSocketRoute

        routes = [
            WebSocketRoute("/ws", self._serve_session),
            Route("/health", lambda _: JSONResponse({"status": "healthy"})),
            *openenv_routes(self.description),
        ]
        app = Starlette(routes=routes)
        right = None if self.token is None else f"Bearer {self.token}".encode()

        async def guard(scope: "Scope", receive: "Receive", send: "Send") -> None:
            """Refuse clients without the token, and web pages, which have an Origin header."""
            connection = HTTPConnection(scope)
            given = connection.headers.get("authorization", "").encode()
            needs_token = right is not None and scope["path"] != "/health"
            if needs_token and not hmac.compare_digest(given, right or b""):
                await Response(status_code=401)(scope, receive, send)
            elif "origin" in connection.headers:
                await Response(status_code=403)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return guard

    async def _serve_session(self, websocket: "WebSocket") -> None:
        from starlette.responses import Response
        from starlette.websockets import WebSocketDisconnect

        client = websocket.client.host if websocket.client else ""
        if len(self._sessions) >= self._max_sessions and not self._make_room(client):
            await websocket.send_denial_response(Response(status_code=503))
            return
        session = Session(self._make_env, self.description, client)
        self._sessions.add(session)
        reason, reply = "", None
        try:
            await websocket.accept()
            while True:
                async with asyncio.timeout(self._idle_seconds) as session.deadline:
                    if reply is not None:
                        await websocket.send_text(reply)
                    event = await websocket.receive()
                session.deadline = None
                if event["type"] == "websocket.disconnect":
                    return
                # A binary message becomes '', which is not JSON.
                future = session.thread.submit(partial(session.handle, event.get("text") or ""))
                reply = await asyncio.shield(asyncio.wrap_future(future))
                if reply is None:
                    break
        except TimeoutError:
            reason = "idle"
        except WebSocketDisconnect:
            return
        finally:
            session.deadline = None
            self._end(session)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await websocket.close(1001 if reason else 1000, reason)

    def _make_room(self, client: str) -> bool:
        """End an idle session of the client with the most; False if `client` has as many.

        Clients of ours resume its episode in another session.
        """
        held = Counter(session.client for session in self._sessions)
        largest, most = held.most_common(1)[0]
        of_largest = [session for session in self._sessions if session.client == largest]
        idle = {s.deadline: s for s in of_largest if s.deadline is not None}
        if held[client] + 1 >= most or not idle:
            return False
        deadline = min(idle, key=lambda each: each.when() or 0.0)
        deadline.reschedule(asyncio.get_running_loop().time())
        idle[deadline].deadline = None
        self._sessions.discard(idle[deadline])
        return True

    def _end(self, session: Session) -> None:
        """End a session; it counts until its environment has returned and is closed."""
        loop = asyncio.get_running_loop()
        discard = partial(self._sessions.discard, session)
        closed = session.thread.submit(session.close)
        closed.add_done_callback(lambda _: loop.call_soon_threadsafe(discard))
        session.thread.stop()


def listen(
    server: EnvironmentServer, host: str, port: int
) -> "tuple[uvicorn.Server, socket.socket, str]":
    """Listen at an address; see `http_server.listen`."""
    from agent_envs.remote import http_server

    return http_server.listen(
        server.app(), host, port, local_only=server.token is None, ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # a short compressed message could expand to a long one
    )  # fmt: skip


def _describe(env: TextEnv, *, with_reference: bool) -> dict[str, Any]:
    """Return the description of a served environment for its clients."""
    base: Any = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(f"{type(base).__name__} is not an environment with tools.")
    # Without paths, which differ between machines with the same data.
    kwargs = dict(env.spec.kwargs) if env.spec else {}
    arguments = {name: value for name, value in kwargs.items() if "/" not in str(value)}
    described = {
        "environment": env.spec.id if env.spec else type(base).__name__,
        "max_episode_steps": env.spec.max_episode_steps if env.spec else None,
        "tool_format": base.tool_format,
        "is_dialogue": type(base).on_message is not ToolEnv.on_message,
        "tools": [tool.schema for tool in base.tools.values()],
        "num_tasks": base.num_tasks,
        "reward_weights": dict(base.reward_weights),
        "outcome_terms": sorted(base.outcome_terms),
        "with_reference": with_reference,
    }
    # Other data shows in the first states.
    first = [env.reset(seed=seed)[0] for seed in range(_NUM_COMPARED)]
    compared = [described, arguments, first]
    text = json.dumps(compared, sort_keys=True, default=lambda v: type(v).__name__)
    return described | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}
