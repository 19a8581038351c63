"""The gateway over HTTP: who may call, what is read of a request, and what becomes of the call."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agent_envs.formats.actions import STRICT_JSON
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.ask import Ask
from agent_trainers.gateway.chat_reply import completion, completion_events
from agent_trainers.gateway.chat_request import ChatRequest, read_chat, validated
from agent_trainers.gateway.connections import Connections
from agent_trainers.gateway.conversation import Turn
from agent_trainers.gateway.generation_loop import GenerationLoop
from agent_trainers.gateway.parameters import check_parameters
from agent_trainers.gateway.responses_reply import response, response_events
from agent_trainers.gateway.responses_request import ResponsesRequest, read_responses
from agent_trainers.gateway.session import Sampling, Session
from agent_trainers.policies.generation import Generation
from agent_trainers.policies.policy import Policy
from agent_trainers.trajectory import ROLE_NAME, StopReason

WRONG_KEY_TEXT: Final = (
    "Incorrect API key for this URL, or its session is closed. Use base_url and key of one session."
)
NOT_OFFERED_TEXT: Final = (
    "{method} {path} is not offered here. POST chat/completions, POST responses and GET models are."
)
WRONG_ROLE_TEXT: Final = (
    "What follows the full stop in the key is the name of a role: a letter, then at most 63 "
    "letters, digits, '_' and '-'."
)
MODEL: Final = {"id": "policy", "object": "model", "created": 0, "owned_by": "agent-r1"}
_NOBODY: Final = "-"
"""Stands for the key of a session that there is not."""

_log = logging.getLogger(__name__)
Endpoint = Callable[[Request, Session], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """Turns requests into calls of sessions."""

    policy: Policy
    loop: GenerationLoop
    sessions: Mapping[str, Session]
    """Those that are open, by the id in their URL."""
    connections: Connections
    tool_format: ToolFormat
    ignored_parameters: Collection[str]
    shows_tools: bool
    """Whether the chat template describes tools; else the system prompt has to."""

    def asgi(self) -> Starlette:
        """Return what a server serves."""
        offered = {
            "chat/completions": ("POST", self._chat),
            "responses": ("POST", self._responses),
            "models": ("GET", self._models),
            "models/{model:path}": ("GET", self._models),
        }
        routes = [
            Route(f"/{{session}}/v1/{path}", self._guarded(endpoint), methods=[method])
            for path, (method, endpoint) in offered.items()
        ]
        anything = Route("/{path:path}", _not_offered, methods=["GET", "POST", "PUT", "DELETE"])
        return Starlette(routes=[*routes, anything])

    def _guarded(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Let in who knows the key of the session in the URL; say errors as the API does."""

        async def answer(request: Request) -> Response:
            session = self.sessions.get(request.path_params["session"])
            kind, key, _ = _credentials(request)
            expected = _NOBODY if session is None else session.key
            is_known = compare_digest(key.encode(), expected.encode())
            if session is None or not is_known or kind.lower() != "bearer":
                return _error(ApiError(401, WRONG_KEY_TEXT, code="invalid_api_key"))
            try:
                with self.connections.in_use(request.scope["client"], session.id):
                    return await endpoint(request, session)
            except ApiError as error:
                session.note_trouble(error)
                return _error(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:  # noqa: BLE001 - what was sent is foreign; it is recorded
                _log.warning("A call of a session failed.", exc_info=True)
                text = f"The gateway failed: {type(error).__name__}: {error}"
                failure = ApiError(500, text, stop_reason=StopReason.POLICY_ERROR)
                session.note_trouble(failure)
                return _error(failure)

        return answer

    async def _models(self, request: Request, session: Session) -> Response:
        if name := request.path_params.get("model"):
            return _json({**MODEL, "id": name})
        return _json({"object": "list", "data": [MODEL]})

    async def _chat(self, request: Request, session: Session) -> Response:
        body = await self._read(request, session, "chat")
        chat = validated(ChatRequest, body)
        ask = read_chat(chat, self.tool_format, shows_tools=self.shows_tools)
        reply_id, turns = await self._sample(request, session, ask)
        if chat.stream:
            return _events(completion_events(chat, reply_id, turns, self.policy.decode))
        return _json(completion(chat, reply_id, turns, self.policy.decode))

    async def _responses(self, request: Request, session: Session) -> Response:
        body = await self._read(request, session, "responses")
        asked = validated(ResponsesRequest, body)
        ask, said = read_responses(
            asked, session.responses, self.tool_format, shows_tools=self.shows_tools
        )
        reply_id, (turn,) = await self._sample(request, session, ask)
        session.responses[reply_id] = [*said, turn.message]
        if asked.stream:
            return _events(response_events(asked, reply_id, turn))
        return _json(response(asked, reply_id, turn))

    async def _read(self, request: Request, session: Session, endpoint: str) -> dict[str, Any]:
        """Return what is to be honoured of a request's body."""
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
        sampling, ignored = self.policy.sampling, self.ignored_parameters
        return check_parameters(body, endpoint, sampling=sampling, ignored=ignored)

    async def _sample(self, request: Request, session: Session, ask: Ask) -> tuple[str, list[Turn]]:
        """Have the turns of a call sampled, unless its client goes away or time runs out.

        Raises:
            ApiError: If it fails.
            ClientDisconnect: If nobody waits any more.
        """
        role = _credentials(request)[2]
        if role and ROLE_NAME.fullmatch(role) is None:
            raise ApiError(401, WRONG_ROLE_TEXT, code="invalid_role")
        ask = replace(ask, role=role)
        samplings = session.admit(ask)
        started = time.perf_counter()
        try:
            generations = await self._wait(request, session, samplings)
            seconds = time.perf_counter() - started
            return session.note(ask, samplings, generations, seconds)
        finally:
            session.release(samplings)

    async def _wait(
        self, request: Request, session: Session, samplings: list[Sampling]
    ) -> list[Generation]:
        limit = min(session.limits.call_timeout_seconds, session.seconds_left)
        futures = [
            asyncio.wrap_future(self.loop.submit(sampling.key, sampling.request))
            for sampling in samplings
        ]
        everything = asyncio.create_task(_all(futures))
        gone = asyncio.ensure_future(request.receive())  # the body is read: what comes is the end
        try:
            await asyncio.wait((everything, gone), timeout=limit, return_when="FIRST_COMPLETED")
            if gone.done():  # first: a turn that nobody hears is none of the episode
                raise ClientDisconnect
            if everything.done():
                return everything.result()
            text = f"The model's turn took longer than {limit:.3g} seconds."
            raise ApiError(504, text, code="timeout", stop_reason=StopReason.TIMEOUT)
        finally:
            gone.cancel()
            everything.cancel()


async def _all(futures: Iterable[asyncio.Future[Generation]]) -> list[Generation]:
    return await asyncio.gather(*futures)  # in a task: a gathering that is cancelled is logged


def _credentials(request: Request) -> tuple[str, str, str]:
    """Return the kind of a request's credentials, the key, and the role that is written after it.

    A key holds no full stop: what follows one is the name of the role that asks.
    """
    kind, _, said = request.headers.get("authorization", "").partition(" ")
    key, _, role = said.strip().partition(".")
    return kind, key, role


async def _not_offered(request: Request) -> Response:
    # The same for whoever asks: it says nothing about sessions.
    path = request.url.path.rpartition("/v1")[2]
    return _error(ApiError(404, NOT_OFFERED_TEXT.format(method=request.method, path=path)))


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    # ASCII: what a program named or a model wrote may hold lone surrogates
    return Response(json.dumps(body), status, media_type="application/json")


def _events(events: Iterable[str]) -> Response:
    return Response("".join(events), media_type="text/event-stream")


def _error(error: ApiError) -> Response:
    return _json(error.body, error.status)
