"""The HTTP application of the gateway: authentication, request bodies, and waiting for turns."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agent_envs.formats.actions import STRICT_JSON
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.chat_api import (
    Body,
    ChatRequest,
    chat_call,
    chat_events,
    chat_reply,
    parse_request,
)
from agent_trainers.gateway.conversation import ModelCall, Turn
from agent_trainers.gateway.responses_api import (
    ResponsesRequest,
    responses_call,
    responses_events,
    responses_reply,
)
from agent_trainers.gateway.session import Sampling, Session
from agent_trainers.policies.policy import Generation
from agent_trainers.trajectory import ROLE_NAME, StopReason

if TYPE_CHECKING:
    from agent_trainers.gateway.gateway import Gateway

WRONG_KEY_TEXT: Final = (
    "Incorrect API key for this URL, or its session is closed. Use base_url and key of one session."
)
NOT_OFFERED_TEXT: Final = (
    "{method} {path} is not offered here. POST chat/completions, POST responses and GET models are."
)
WRONG_ROLE_TEXT: Final = (
    "The text after the full stop in the key must be the name of a role: a letter, then at most 63 "
    "letters, digits, '_' and '-'."
)
_MODEL: Final = {"id": "policy", "object": "model", "created": 0, "owned_by": "agent-r1"}
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}
"""Passed to the chat template to find out whether it describes tools."""
_NO_KEY: Final = "-"
"""Compared with the key of a request whose session does not exist."""

_log = logging.getLogger(__name__)
Endpoint = Callable[[Request, Session], Awaitable[Response]]


class Application:
    """Turns requests into calls of sessions."""

    def __init__(self, gateway: "Gateway") -> None:
        """Serve the sessions of `gateway`."""
        self._gateway, self._policy = gateway, gateway.policy
        self._format = gateway.tool_format
        # Else the system prompt describes them
        self._shows_tools = self._format.is_native and self._policy.shows_tools([_PROBE_TOOL])

    def asgi(self) -> Starlette:
        """Return the ASGI application."""
        endpoints = {
            "chat/completions": ("POST", self._chat),
            "responses": ("POST", self._responses),
            "models": ("GET", self._models),
            "models/{model:path}": ("GET", self._models),
        }
        routes = [
            Route(f"/{{session}}/v1/{path}", self._authenticated(endpoint), methods=[method])
            for path, (method, endpoint) in endpoints.items()
        ]
        anything = Route("/{path:path}", _not_offered, methods=["GET", "POST", "PUT", "DELETE"])
        return Starlette(routes=[*routes, anything])

    def _authenticated(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Require the key of the session in the URL; return errors in the form of the API."""

        async def respond(request: Request) -> Response:
            session = self._gateway.sessions.get(request.path_params["session"])
            kind, key, _ = _credentials(request)
            expected = _NO_KEY if session is None else session.key
            is_correct = compare_digest(key.encode(), expected.encode())
            if session is None or not is_correct or kind.lower() != "bearer":
                return _error(ApiError(401, WRONG_KEY_TEXT, code="invalid_api_key"))
            try:
                with self._gateway.connections.in_use(request.scope["client"], session.id):
                    return await endpoint(request, session)
            except ClientDisconnect:
                return Response(status_code=499)  # not read by any client
            except ApiError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - foreign input; the error is recorded
                _log.warning("A call of a session failed.", exc_info=True)
                text = f"The gateway failed: {type(error).__name__}: {error}"
                failure = ApiError(500, text, stop_reason=StopReason.POLICY_ERROR)
            session.record_error(failure)
            return _error(failure)

        return respond

    async def _models(self, request: Request, session: Session) -> Response:
        if name := request.path_params.get("model"):
            return _json({**_MODEL, "id": name})
        return _json({"object": "list", "data": [_MODEL]})

    async def _chat(self, request: Request, session: Session) -> Response:
        chat = await self._read(ChatRequest, request, session)
        call = chat_call(chat, self._format, shows_tools=self._shows_tools)
        reply_id, turns = await self._sample(request, session, call)
        if chat.stream:
            return _events(chat_events(chat, reply_id, turns, self._policy.decode))
        return _json(chat_reply(chat, reply_id, turns, self._policy.decode))

    async def _responses(self, request: Request, session: Session) -> Response:
        body = await self._read(ResponsesRequest, request, session)
        call, conversation = responses_call(
            body, session.responses, self._format, shows_tools=self._shows_tools
        )
        reply_id, (turn,) = await self._sample(request, session, call)
        session.responses[reply_id] = [*conversation, turn.message]
        if body.stream:
            return _events(responses_events(body, reply_id, turn))
        return _json(responses_reply(body, reply_id, turn))

    async def _read(self, kind: type[Body], request: Request, session: Session) -> Body:
        """Return the request's body."""
        limit, received = session.limits.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout(session.limits.call_timeout_seconds):
                async for piece in request.stream():
                    received += piece
                    if len(received) > limit:
                        text = f"The request is larger than {limit} bytes (max_body_bytes)."
                        raise ApiError(413, text, code="request_too_large")
        except TimeoutError:
            raise ApiError(408, "The request did not arrive in time.", code="timeout") from None
        try:
            body = STRICT_JSON.decode(received.decode())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"The request is not valid JSON: {error}") from None
        if not isinstance(body, dict):
            raise ApiError(400, "The request must be a JSON object.")
        sampling, ignored = self._policy.sampling, self._gateway.ignored_parameters
        return parse_request(kind, body, sampling=sampling, ignored=ignored)

    async def _sample(
        self, request: Request, session: Session, call: ModelCall
    ) -> tuple[str, list[Turn]]:
        """Sample the turns of a call."""
        role = _credentials(request)[2]
        if role and ROLE_NAME.fullmatch(role) is None:
            raise ApiError(401, WRONG_ROLE_TEXT, code="invalid_role")
        call = replace(call, role=role)
        samplings = session.admit(call)
        started = time.perf_counter()
        try:
            generations = await self._wait(request, session, samplings)
            return session.record(call, samplings, generations, time.perf_counter() - started)
        finally:
            session.release(samplings)

    async def _wait(
        self, request: Request, session: Session, samplings: list[Sampling]
    ) -> list[Generation]:
        limit = min(session.limits.call_timeout_seconds, session.seconds_left)
        futures = [
            asyncio.wrap_future(self._gateway.loop.submit(sampling.key, sampling.request))
            for sampling in samplings
        ]
        sampled = asyncio.create_task(_all(futures))
        disconnected = asyncio.ensure_future(request.receive())  # its body was read before
        try:
            await asyncio.wait(
                (sampled, disconnected), timeout=limit, return_when="FIRST_COMPLETED"
            )
            if disconnected.done():  # checked first: turns of disconnected clients are dropped
                raise ClientDisconnect
            if sampled.done():
                return sampled.result()
            text = f"The model's turn took longer than {limit:.3g} seconds."
            raise ApiError(504, text, code="timeout", stop_reason=StopReason.TIMEOUT)
        finally:
            disconnected.cancel()
            sampled.cancel()


async def _all(futures: Iterable[asyncio.Future[Generation]]) -> list[Generation]:
    return await asyncio.gather(*futures)  # in a task: asyncio logs a gather that is cancelled


def _credentials(request: Request) -> tuple[str, str, str]:
    """Return the kind of credentials, the key, and the role after the key's full stop."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    key, _, role = token.strip().partition(".")
    return kind, key, role


async def _not_offered(request: Request) -> Response:
    # The same reply for every client, so that it does not show which sessions exist.
    path = request.url.path.rpartition("/v1")[2]
    return _error(ApiError(404, NOT_OFFERED_TEXT.format(method=request.method, path=path)))


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    # ASCII, because names and sampled text may hold lone surrogates
    return Response(json.dumps(body), status, media_type="application/json")


def _events(events: Iterable[str]) -> Response:
    return Response("".join(events), media_type="text/event-stream")


def _error(error: ApiError) -> Response:
    return _json(error.body, error.status)
