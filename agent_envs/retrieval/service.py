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
from dataclasses import dataclass
from typing import Annotated, Any, Final

import pydantic
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agent_envs.errors import ConfigurationError
from agent_envs.retrieval.corpus import Hit, Retriever, search_many

RETRY_AFTER_SECONDS: Final = 1
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits of a retrieval server."""

    topk: int = 3
    """Passages per query if a request does not say (Search-R1's default)."""
    max_topk: int = 1_000
    """Passages per query, at most."""
    max_queries: int = 4_096
    """Queries of a request; Search-R1 sends a whole batch of rollouts at once."""
    max_query_chars: int = 8_000
    """Characters of a query."""
    max_passages: int = 50_000
    """Passages of an answer: queries times ``topk``."""
    max_body_bytes: int = 16 * 2**20
    """Size of a request."""
    max_body_seconds: int = 60
    """Seconds in which a request must arrive."""
    max_pending: int = 8_192
    """Queries that wait or are searched; more are refused with 503."""

    def __post_init__(self) -> None:
        """Check the limits against each other."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.max_queries > self.max_pending:
            raise ConfigurationError(
                f"max_queries ({self.max_queries}) must not exceed max_pending "
                f"({self.max_pending}): the server would refuse such a request forever."
            )
        if not self.topk <= self.max_topk <= self.max_passages:
            raise ConfigurationError(
                f"topk ({self.topk}), max_topk ({self.max_topk}) and max_passages "
                f"({self.max_passages}) must be in ascending order."
            )


class _RefusedError(Exception):
    """A request that is refused, with a status, the field and the reason."""

    def __init__(self, status: int, field: tuple[Any, ...], reason: str) -> None:
        super().__init__(reason)
        self.status, self.detail = status, [{"loc": ["body", *field], "msg": reason}]


class Service:
    """The routes of the server and their shared state."""

    def __init__(
        self, retriever: Retriever, *, engine: str, num_passages: int, limits: ServiceLimits
    ) -> None:
        """Serve `retriever`; ``/health`` reports the name of its engine and its size."""
        self._retriever, self._limits = retriever, limits
        self._health = {"status": "ok", "engine": engine, "passages": num_passages}
        self._request = _request_model(limits)
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
            asked = self._parse(await self._read_body(request))
        except _RefusedError as error:
            # The unread rest of a body would be taken for the next request.
            headers = {"Connection": "close"} if error.status in (408, 413) else None
            return JSONResponse({"detail": error.detail}, error.status, headers)
        except ClientDisconnect:
            return Response(status_code=499)  # never received
        if self._num_pending + len(asked.queries) > self._limits.max_pending:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return JSONResponse({"detail": "Too many queries are waiting."}, 503, headers)
        self._num_queries += len(asked.queries)
        self._num_pending += len(asked.queries)
        try:
            top_k = asked.topk or self._limits.topk
            body = await to_thread.run_sync(
                self._search, asked.queries, top_k, asked.return_scores, limiter=self._one_search
            )
        except Exception:
            _LOGGER.exception("The search failed.")
            return JSONResponse({"detail": "The search failed."}, 500)
        finally:
            self._num_pending -= len(asked.queries)
        return Response(body, media_type="application/json")

    async def _read_body(self, request: Request) -> bytes:
        body, limits = bytearray(), self._limits
        try:
            async with asyncio.timeout(limits.max_body_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limits.max_body_bytes:
                        raise _RefusedError(413, (), f"at most {limits.max_body_bytes} bytes")
        except TimeoutError:
            reason = f"did not arrive within {limits.max_body_seconds} seconds"
            raise _RefusedError(408, (), reason) from None
        return bytes(body)

    def _parse(self, body: bytes) -> Any:
        try:
            asked: Any = self._request.model_validate_json(body)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise _RefusedError(422, first["loc"], first["msg"]) from None
        if len(asked.queries) * (asked.topk or self._limits.topk) > self._limits.max_passages:
            reason = f"queries times topk must be at most {self._limits.max_passages}"
            raise _RefusedError(422, ("topk",), reason)
        return asked

    def _search(self, queries: Sequence[str], top_k: int, with_scores: bool) -> bytes:
        started = time.perf_counter()
        found = search_many(self._retriever, queries, top_k)
        self._search_seconds += time.perf_counter() - started
        result = [[_as_json(hit, with_scores) for hit in hits] for hits in found]
        return json.dumps({"result": result}).encode()


def _as_json(hit: Hit, with_score: bool) -> object:
    title = " ".join(hit.passage.title.splitlines())  # the first line is the title
    document = {"id": str(hit.index), "contents": f"{title}\n{hit.passage.text}"}
    return {"document": document, "score": hit.score} if with_score else document


def _request_model(limits: ServiceLimits) -> type[pydantic.BaseModel]:
    text = Annotated[str, pydantic.Field(max_length=limits.max_query_chars)]
    queries = Annotated[list[text], pydantic.Field(max_length=limits.max_queries)]
    topk = Annotated[int, pydantic.Field(ge=1, le=limits.max_topk)]
    return pydantic.create_model(
        "RetrieveRequest",
        __config__=pydantic.ConfigDict(strict=True),
        queries=(queries, ...),
        topk=(topk | None, None),
        return_scores=(bool, False),
    )


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
