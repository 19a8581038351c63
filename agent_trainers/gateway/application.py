"""The HTTP application of the gateway: authentication, request bodies, and waiting for turns."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agent_envs.formats.actions import STRICT_JSON
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.conversation import Turn
from agent_trainers.gateway.replies import chat_events, chat_reply, responses_reply
from agent_trainers.gateway.requests import (
    CHAT_PARAMETERS,
    RESPONSES_PARAMETERS,
    Request,
    parse_request,
)
from agent_trainers.gateway.session import Call, Session
from agent_trainers.policies.policy import Generation
from agent_trainers.trajectory import ROLE_NAME, StopReason

if TYPE_CHECKING:
    from agent_trainers.gateway.gateway import Gateway

_MODEL: Final = {"id": "policy", "object": "model", "created": 0, "owned_by": "agent-r1"}

_log = logging.getLogger(__name__)
Endpoint = Callable[[HttpRequest, Session, str], Awaitable[Response]]


class Application:
    """Turns requests into calls of sessions."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def asgi(self) -> Starlette:
        endpoints = {
            "chat/completions": ("POST", self._chat),
            "responses": ("POST", self._responses),
            "models": ("GET", self._models),
        }
        return Starlette(
            routes=[
                Route(f"/{{session}}/v1/{path}", self._authenticated(endpoint), methods=[method])
                for path, (method, endpoint) in endpoints.items()
            ]
        )

    def _authenticated(self, endpoint: Endpoint) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Require the key of the session in the URL; return errors in the form of the API."""

        async def respond(request: HttpRequest) -> Response:
            session = self._gateway.sessions.get(request.path_params["session"])
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            key, _, role = token.strip().partition(".")
            expected = "-" if session is None else session.key
            is_correct = compare_digest(key.encode(), expected.encode())
            if session is None or not is_correct or kind.lower() != "bearer":
                text = "Incorrect API key for this URL, or its session is closed."
                return _error(ApiError(401, text))
            try:
                if role and ROLE_NAME.fullmatch(role) is None:
                    text = "The text after the full stop in the key must be the name of a role."
                    raise ApiError(401, text)
                with self._gateway.connections.in_use(request.scope["client"], session.id):
                    return await endpoint(request, session, role)
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

    async def _models(self, _: HttpRequest, session: Session, role: str) -> Response:
        return _json({"object": "list", "data": [_MODEL]})

    async def _chat(self, http: HttpRequest, session: Session, role: str) -> Response:
        request = await self._read(http, session, CHAT_PARAMETERS)
        turn = await self._sample(http, session, role, request)
        if request.stream:
            return Response("".join(chat_events(request, turn)), media_type="text/event-stream")
        return _json(chat_reply(request, turn))

    async def _responses(self, http: HttpRequest, session: Session, role: str) -> Response:
        request = await self._read(http, session, RESPONSES_PARAMETERS)
        return _json(responses_reply(request, await self._sample(http, session, role, request)))

    async def _read(
        self, http: HttpRequest, session: Session, honoured: Collection[str]
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
        sampling, ignored = self._gateway.policy.sampling, self._gateway.ignored_parameters
        return parse_request(body, honoured, sampling=sampling, ignored=ignored)

    async def _sample(
        self, http: HttpRequest, session: Session, role: str, request: Request
    ) -> Turn:
        call = session.begin(request, role)
        started = time.perf_counter()
        try:
            generation = await self._wait(http, session, call)
            return session.record(call, generation, time.perf_counter() - started)
        finally:
            session.release(call)

    async def _wait(self, http: HttpRequest, session: Session, call: Call) -> Generation:
        limit = min(session.limits.call_timeout_seconds, session.seconds_left)
        sampled = asyncio.wrap_future(self._gateway.loop.submit(call.key, call.sampling))
        disconnected = asyncio.ensure_future(http.receive())  # its body was read before
        try:
            await asyncio.wait(
                (sampled, disconnected), timeout=limit, return_when="FIRST_COMPLETED"
            )
            if disconnected.done():  # checked first: turns of disconnected clients are dropped
                raise ClientDisconnect
            if sampled.done():
                return sampled.result()
            text = f"The model's turn took longer than {limit:.3g} seconds."
            raise ApiError(504, text, stop_reason=StopReason.TIMEOUT)
        finally:
            disconnected.cancel()
            sampled.cancel()


def _json(body: Any, status: int = 200) -> Response:
    # ASCII, because names and sampled text may hold lone surrogates
    return Response(json.dumps(body), status, media_type="application/json")


def _error(error: ApiError) -> Response:
    return _json(error.body, error.status)
