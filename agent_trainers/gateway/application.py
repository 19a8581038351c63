"""The HTTP application of the gateway: connections, authentication, turns, and replies.

Calls are read when a turn has ended, so a streamed turn is sent in one event at its end.

Each open connection costs the process a file descriptor. Beyond a limit, the session with the most
connections loses the one that has been idle for longest. A connection belongs to the session whose
key it sent last; all that sent none count together as one session's. So a program that opens
connections beyond its share closes its own, and a client that sends its key at once is not kept out
by others that only connect.
"""

import asyncio
import functools
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent_envs.formats.actions import STRICT_JSON
from agent_trainers.gateway.requests import (
    CHAT_PARAMETERS,
    RESPONSES_PARAMETERS,
    ApiError,
    Request,
    Turn,
    parse_request,
)
from agent_trainers.gateway.session import Session
from agent_trainers.policies.policy import Generation, GenerationRequest
from agent_trainers.trajectory import ROLE_NAME, StopReason

if TYPE_CHECKING:
    from agent_trainers.gateway.gateway import Gateway

_MAX_CONNECTIONS: Final = 4096

_log = logging.getLogger(__name__)
_Json = dict[str, Any]
_Endpoint = Callable[["Gateway", HttpRequest, Session, str], Awaitable[Response]]


def make_application(gateway: "Gateway") -> Starlette:
    """Return the application that turns requests into calls of the sessions of `gateway`."""
    routes = []
    for method, path, endpoint in (
        ("POST", "chat/completions", _chat),
        ("POST", "responses", _responses),
        ("GET", "models", _models),
    ):
        respond = functools.partial(_authenticated, gateway, endpoint)
        routes.append(Route(f"/{{session}}/v1/{path}", respond, methods=[method]))
    return Starlette(routes=routes)


async def _authenticated(gateway: "Gateway", endpoint: _Endpoint, http: HttpRequest) -> Response:
    """Require the key of the session in the URL; return errors in the form of the API."""
    session = gateway.sessions.get(http.path_params["session"])
    kind, _, token = http.headers.get("authorization", "").partition(" ")
    key, _, role = token.strip().partition(".")
    expected = "-" if session is None else session.key
    is_correct = compare_digest(key.encode(), expected.encode())
    if session is None or not is_correct or kind.lower() != "bearer":
        return _error(ApiError(401, "Incorrect API key for this URL, or its session is closed."))
    try:
        if role and ROLE_NAME.fullmatch(role) is None:
            text = "The text after the full stop in the key must be the name of a role."
            raise ApiError(401, text)
        with http.state.connection.in_use(session.id):
            return await endpoint(gateway, http, session, role)
    except ClientDisconnect:
        return Response(status_code=499)  # not read by any client
    except ApiError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - foreign input; the error is recorded
        _log.warning("A call of a session failed.", exc_info=True)
        text = f"The gateway failed: {type(error).__name__}: {error}"
        failure = ApiError(500, text, StopReason.POLICY_ERROR)
    session.record_error(failure)
    return _error(failure)


async def _models(_: "Gateway", http: HttpRequest, session: Session, role: str) -> Response:
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "agent-r1"}
    return _json({"object": "list", "data": [model]})


async def _chat(gateway: "Gateway", http: HttpRequest, session: Session, role: str) -> Response:
    request = await _read(gateway, http, session, CHAT_PARAMETERS)
    turn = await session.sample(request, role, functools.partial(_wait, gateway, http, session))
    message = {"role": "assistant", "refusal": None, **_message(turn)}
    # A cut-off turn reports "length" even with whole calls, since a rollout ends there.
    is_call = turn.message.calls and turn.finish_reason == "stop"
    finish_reason = "tool_calls" if is_call else turn.finish_reason
    choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    reply = {"id": turn.reply_id, "created": int(time.time()), "model": request.model}
    if not request.stream:
        choices = [{**choice, "message": message}]
        return _json(
            {**reply, "object": "chat.completion", "choices": choices, "usage": _usage(turn)}
        )
    reply["object"] = "chat.completion.chunk"
    events = [{**reply, "choices": [{**choice, "delta": message}]}]
    if request.stream_options.get("include_usage"):
        events.append({**reply, "choices": [], "usage": _usage(turn)})
    written = [*map(json.dumps, events), "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in written)
    return Response(body, media_type="text/event-stream")


async def _responses(
    gateway: "Gateway", http: HttpRequest, session: Session, role: str
) -> Response:
    request = await _read(gateway, http, session, RESPONSES_PARAMETERS)
    turn = await session.sample(request, role, functools.partial(_wait, gateway, http, session))
    usage, is_cut = _usage(turn), turn.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    return _json({
        "id": turn.reply_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions or None,
        "metadata": {},
        "model": request.model,
        "output": _output(turn, status),
        "parallel_tool_calls": request.parallel_tool_calls,
        "tool_choice": request.tool_choice,
        "tools": [{"type": "function", **tool.model_dump()} for tool in request.tools],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    })  # fmt: skip


async def _read(
    gateway: "Gateway", http: HttpRequest, session: Session, honoured: Collection[str]
) -> Request:
    limit, received = session.limits.max_body_bytes, bytearray()
    try:
        async with asyncio.timeout(session.limits.call_timeout_seconds):
            async for piece in http.stream():
                received += piece
                if len(received) > limit:
                    text = f"The request is larger than {limit} bytes (max_body_bytes)."
                    raise ApiError(413, text)
    except TimeoutError:
        raise ApiError(408, "The request did not arrive in time.") from None
    try:
        body = STRICT_JSON.decode(received.decode())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The request is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The request must be a JSON object.")
    kept = {name: value for name, value in body.items() if name not in gateway.ignored_parameters}
    return parse_request(kept, honoured, gateway.policy.sampling)


async def _wait(
    gateway: "Gateway", http: HttpRequest, session: Session, key: int, request: GenerationRequest
) -> Generation:
    limit = min(session.limits.call_timeout_seconds, session.seconds_left)
    sampled = asyncio.wrap_future(gateway.submit(key, request))
    disconnected = asyncio.ensure_future(http.receive())  # its body was read before
    try:
        await asyncio.wait((sampled, disconnected), timeout=limit, return_when="FIRST_COMPLETED")
        if disconnected.done():  # checked first: turns of disconnected clients are dropped
            raise ClientDisconnect
        if sampled.done():
            return sampled.result()
        text = f"The model's turn took longer than {limit:.3g} seconds."
        raise ApiError(504, text, StopReason.TIMEOUT)
    finally:
        disconnected.cancel()
        sampled.cancel()


def _usage(turn: Turn) -> dict[str, int]:
    prompt, completion = len(turn.transition.prompt_ids), len(turn.transition.completion_ids)
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**tokens, "total_tokens": prompt + completion}


def _message(turn: Turn) -> _Json:
    content, calls = turn.message.content, turn.message.calls
    if not calls:
        return {"content": content}
    written = [
        {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
    return {"content": content or None, "tool_calls": written}


def _output(turn: Turn, status: str) -> list[_Json]:
    items: list[_Json] = []
    if turn.message.content or not turn.message.calls:
        text = turn.message.content
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in turn.message.calls:
        function = {"name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "call_id": call.id, **function})
    return [
        {"id": f"{turn.reply_id}-{place}", "status": status, **item}
        for place, item in enumerate(items)
    ]


def _json(body: _Json, status: int = 200) -> Response:
    # ASCII, because names and sampled text may hold lone surrogates
    return Response(json.dumps(body), status, media_type="application/json")


def _error(error: ApiError) -> Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    is_overflow = error.stop_reason is StopReason.CONTEXT_OVERFLOW
    code = "context_length_exceeded" if is_overflow else None
    details = {"message": str(error), "type": kind, "param": None, "code": code}
    return _json({"error": details}, error.status)


def default_limit() -> int:
    """Return how many connections may be open: half of the process's file descriptors."""
    try:
        import resource
    except ImportError:  # on Windows
        return _MAX_CONNECTIONS
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = soft_limit == resource.RLIM_INFINITY
    return _MAX_CONNECTIONS if unlimited else min(soft_limit // 2, _MAX_CONNECTIONS)


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn's h11 server, which bounds request heads.

    Relies on uvicorn passing `app_state` to the application as ``request.state``.
    """

    max_open: int
    all_open: "dict[LimitedProtocol, None]"
    """The open ones of a server, least recently used first."""
    session_id = ""
    is_busy = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {"connection": self}
        self.all_open[self] = None
        if len(self.all_open) > self.max_open:
            held = Counter(each.session_id for each in self.all_open)
            most = max(held.values())
            largest = [each for each in self.all_open if held[each.session_id] == most]
            evicted = min(largest, key=lambda each: each.is_busy)  # the first idle one
            del self.all_open[evicted]
            evicted.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.all_open.pop(self, None)
        super().connection_lost(exc)

    @contextmanager
    def in_use(self, session_id: str) -> Iterator[None]:
        """Mark this connection, which sent a session's key, as busy."""
        self.session_id = session_id
        self._mark(is_busy=True)
        try:
            yield
        finally:
            self._mark(is_busy=False)

    def _mark(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        if self in self.all_open:  # else it was closed
            self.all_open[self] = self.all_open.pop(self)
