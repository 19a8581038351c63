"""The HTTP application of the gateway: authentication, bodies, turns, and streams.

Calls are read when a turn has ended, so a streamed turn is sent in one piece at its end; until then
comments keep the connection from timing out.
"""

import asyncio
import functools
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agent_envs.formats.actions import STRICT_JSON
from agent_trainers.gateway.dialects import CHAT, DIALECTS, Dialect
from agent_trainers.gateway.requests import ApiError, Request
from agent_trainers.gateway.session import Session
from agent_trainers.gateway.turns import Turn
from agent_trainers.policies.policy import Generation, GenerationRequest
from agent_trainers.trajectory import ROLE_NAME, StopReason

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from agent_trainers.gateway.gateway import Gateway

HEARTBEAT_SECONDS: Final = 10.0
"""Time between the comments in a stream whose turn has not ended."""
_MODEL: Final = {"id": "policy", "object": "model", "created": 0, "owned_by": "agent-r1"}

_log = logging.getLogger(__name__)


def make_application(gateway: "Gateway") -> Starlette:
    """Return the application that turns requests into calls of the sessions of `gateway`."""
    routes = [Route("/{session}/v1/models", _Endpoint(gateway, CHAT), methods=["GET"])]
    for dialect in DIALECTS:
        endpoint = _Endpoint(gateway, dialect)
        routes += [
            Route(f"/{{session}}/v1/{path}", endpoint, methods=["POST"]) for path in dialect.paths
        ]
    return Starlette(routes=routes)


class _Endpoint:
    """The ASGI application of the routes of one dialect."""

    def __init__(self, gateway: "Gateway", dialect: Dialect) -> None:
        self._gateway, self._dialect = gateway, dialect

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        http = HttpRequest(scope, receive, send)
        try:
            session, role = self._authenticate(http)
        except ApiError as error:
            return await self._error(error)(scope, receive, send)
        with http.state.connection.in_use(session.id):
            try:
                with _recorded(session):
                    response = await self._respond(http, session, role)
            except ClientDisconnect:
                response = Response(status_code=499)  # not read by any client
            except ApiError as error:
                response = self._error(error)
            await response(scope, receive, send)

    def _authenticate(self, http: HttpRequest) -> tuple[Session, str]:
        """Return the session in the URL, whose key the request has, and the role in the key."""
        session = self._gateway.sessions.get(http.path_params["session"])
        kind, _, token = http.headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else http.headers.get("x-api-key", "")
        key, _, role = given.partition(".")
        expected = "-" if session is None else session.key
        if not compare_digest(key.encode(), expected.encode()) or session is None:
            raise ApiError(401, "Incorrect API key for this URL, or its session is closed.")
        if role and ROLE_NAME.fullmatch(role) is None:
            text = "The text after the full stop in the key must be the name of a role."
            raise ApiError(401, text)
        return session, role

    async def _respond(self, http: HttpRequest, session: Session, role: str) -> Response:
        if http.method != "POST":
            return _json({"object": "list", "data": [_MODEL]})
        request = await self._read(http, session)
        wait = functools.partial(_wait, self._gateway, http, session)
        sampled = asyncio.ensure_future(session.sample(request, role, wait))
        try:
            # A failure before the first heartbeat has its own status.
            seconds = HEARTBEAT_SECONDS if request.stream else None
            await asyncio.wait([sampled], timeout=seconds)
            if not sampled.done():
                stream = self._stream(session, request, sampled)
                return StreamingResponse(stream, media_type="text/event-stream")
            turn = sampled.result()
        except asyncio.CancelledError:
            sampled.cancel()
            raise
        if request.stream:
            body = self._dialect.write_stream(request, turn)
            return Response(body, media_type="text/event-stream")
        return _json(self._dialect.reply(request, turn))

    async def _stream(
        self, session: Session, request: Request, sampled: "asyncio.Future[Turn]"
    ) -> AsyncIterator[str]:
        try:
            while not sampled.done():
                yield ": the turn has not ended\n\n"
                await asyncio.wait([sampled], timeout=HEARTBEAT_SECONDS)
            with _recorded(session):
                turn = sampled.result()
            yield self._dialect.write_stream(request, turn)
        except ApiError as error:
            yield self._dialect.write_event(self._dialect.error(error))
        except ClientDisconnect:
            return
        finally:
            sampled.cancel()

    async def _read(self, http: HttpRequest, session: Session) -> Request:
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
        ignored = self._gateway.ignored_parameters
        kept = {name: value for name, value in body.items() if name not in ignored}
        return self._dialect.read(kept, self._gateway.policy.sampling)

    def _error(self, error: ApiError) -> Response:
        return _json(self._dialect.error(error), error.status)


@contextmanager
def _recorded(session: Session) -> Iterator[None]:
    """Record why a call of a session fails; any other error becomes an `ApiError`."""
    try:
        yield
    except (ApiError, ClientDisconnect) as error:
        if isinstance(error, ApiError):
            session.record_error(error)
        raise
    except Exception as error:  # noqa: BLE001 - foreign input; the error is recorded
        _log.warning("A call of a session failed.", exc_info=True)
        text = f"The gateway failed: {type(error).__name__}: {error}"
        failure = ApiError(500, text, StopReason.POLICY_ERROR)
        session.record_error(failure)
        raise failure from None


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


def _json(body: dict[str, Any], status: int = 200) -> Response:
    # ASCII, because names and sampled text may hold lone surrogates
    return Response(json.dumps(body), status, media_type="application/json")
