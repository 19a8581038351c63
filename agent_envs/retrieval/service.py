"""A retrieval server: Search-R1's ``POST /retrieve`` over any `Retriever`, with health and metrics.

Requests that exceed a limit are refused before anything is searched: with 422 (naming the field),
408 or 413, or with 503 while too many queries are waiting.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final

import pydantic
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agent_envs.retrieval.corpus import Hit, Retriever, search_many

DEFAULT_TOPK: Final = 3
"""Passages per query if a request does not say (Search-R1's default)."""
MAX_PASSAGES: Final = 50_000
"""Passages of an answer: queries times ``topk``."""
MAX_BODY_BYTES: Final = 16 * 2**20
MAX_BODY_SECONDS: Final = 60
MAX_PENDING: Final = 8_192
"""Queries that wait or are searched; more are refused with 503."""
RETRY_AFTER_SECONDS: Final = 1
_LOGGER: Final = logging.getLogger(__name__)


class RetrieveRequest(pydantic.BaseModel):
    """Body of ``POST /retrieve``; Search-R1 sends the queries of a whole batch of rollouts."""

    model_config = pydantic.ConfigDict(strict=True)

    queries: Annotated[
        list[Annotated[str, pydantic.Field(max_length=8_000)]], pydantic.Field(max_length=4_096)
    ]
    topk: Annotated[int, pydantic.Field(ge=1, le=1_000)] | None = None
    return_scores: bool = False


class _RefusedError(Exception):
    """A request that is refused, with a status, the field and the reason."""

    def __init__(self, status: int, field: tuple[Any, ...], reason: str) -> None:
        super().__init__(reason)
        self.status, self.detail = status, [{"loc": ["body", *field], "msg": reason}]


class Service:
    """The routes of the server and their shared state."""

    def __init__(self, retriever: Retriever, *, engine: str, num_passages: int) -> None:
        """Serve `retriever`; ``/health`` reports the name of its engine and its size."""
        self._retriever = retriever
        self._health = {"status": "ok", "engine": engine, "passages": num_passages}
        self._one_search = CapacityLimiter(1)  # retrievers need not be thread-safe
        self._num_pending = self._num_queries = 0
        self._search_seconds = 0.0
        self._statuses: Counter[int] = Counter()
        self.app = Starlette(
            routes=[
                Route("/retrieve", self.retrieve, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ]
        )

    async def retrieve(self, request: Request) -> Response:
        """Answer ``POST /retrieve``."""
        response = await self._respond(request)
        self._statuses[response.status_code] += 1
        return response

    async def health(self, request: Request) -> Response:
        """Answer ``GET /health``."""
        return JSONResponse(self._health)

    async def metrics(self, request: Request) -> Response:
        """Answer ``GET /metrics`` in Prometheus' text format."""
        requests = (f'requests_total{{status="{s}"}} {n}' for s, n in self._statuses.items())
        lines = [
            *requests,
            f"pending_queries {self._num_pending}",
            f"queries_total {self._num_queries}",
            f"search_seconds_total {self._search_seconds:.6f}",
        ]
        text = "".join(f"retrieval_{line}\n" for line in lines)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _respond(self, request: Request) -> Response:
        try:
            asked = _parse(await _read_body(request))
        except _RefusedError as error:
            # The unread rest of a body would be taken for the next request.
            headers = {"Connection": "close"} if error.status in (408, 413) else None
            return JSONResponse({"detail": error.detail}, error.status, headers)
        except ClientDisconnect:
            return Response(status_code=499)  # never received
        if self._num_pending + len(asked.queries) > MAX_PENDING:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return JSONResponse({"detail": "Too many queries are waiting."}, 503, headers)
        self._num_queries += len(asked.queries)
        self._num_pending += len(asked.queries)
        try:
            top_k = asked.topk or DEFAULT_TOPK
            body = await to_thread.run_sync(
                self._search, asked.queries, top_k, asked.return_scores, limiter=self._one_search
            )
        except Exception:
            _LOGGER.exception("The search failed.")
            return JSONResponse({"detail": "The search failed."}, 500)
        finally:
            self._num_pending -= len(asked.queries)
        return Response(body, media_type="application/json")

    def _search(self, queries: Sequence[str], top_k: int, with_scores: bool) -> bytes:
        started = time.perf_counter()
        found = search_many(self._retriever, queries, top_k)
        self._search_seconds += time.perf_counter() - started
        result = [[_as_json(hit, with_scores) for hit in hits] for hits in found]
        return json.dumps({"result": result}).encode()


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _RefusedError(413, (), f"at most {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        reason = f"did not arrive within {MAX_BODY_SECONDS} seconds"
        raise _RefusedError(408, (), reason) from None
    return bytes(body)


def _parse(body: bytes) -> RetrieveRequest:
    try:
        asked = RetrieveRequest.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _RefusedError(422, first["loc"], first["msg"]) from None
    if len(asked.queries) * (asked.topk or DEFAULT_TOPK) > MAX_PASSAGES:
        reason = f"queries times topk must be at most {MAX_PASSAGES}"
        raise _RefusedError(422, ("topk",), reason)
    return asked


def _as_json(hit: Hit, with_score: bool) -> object:
    title = " ".join(hit.passage.title.splitlines())  # the first line is the title
    document = {"id": str(hit.index), "contents": f"{title}\n{hit.passage.text}"}
    return {"document": document, "score": hit.score} if with_score else document


def serve(service: Service, *, host: str, port: int) -> None:
    """Serve until the process is stopped, then finish accepted requests; print the address.

    Port 0 takes a free one.
    """
    import uvicorn

    config = uvicorn.Config(
        service.app, host=host, port=port, access_log=False, log_level="warning",
        timeout_keep_alive=65,  # longer than clients keep idle connections
    )  # fmt: skip
    listening = config.bind_socket()
    name = f"[{host}]" if ":" in host else host
    print(f"http://{name}:{listening.getsockname()[1]}", flush=True)  # noqa: T201
    uvicorn.Server(config).run(sockets=[listening])
