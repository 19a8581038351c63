"""A retrieval server: Search-R1's ``/retrieve`` over any `Retriever`, with health and metrics.

What it takes, it answers: requests that exceed a limit are refused with 422, and those that come
while too much is waiting with 503, before anything is searched for.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import pydantic
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agent_envs.errors import ConfigurationError
from agent_envs.retrieval.batches import Batches, BusyError, Query
from agent_envs.retrieval.corpus import Retriever

RETRY_AFTER_SECONDS: Final = 1
_HELP: Final = {
    "queries": "Queries of requests that were taken or refused as too many.",
    "cache_hits": "Queries answered without a search of their own.",
    "batches": "Calls of the search engine.",
    "searches": "Queries in them.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """How much a server takes on."""

    topk: int = 3
    """Passages per query, where a request does not say (Search-R1's default)."""
    max_topk: int = 1_000
    """Passages per query, at most."""
    max_queries: int = 4_096
    """Queries of a request; Search-R1 asks for a whole batch of rollouts at once."""
    max_query_chars: int = 8_000
    """Characters of a query."""
    max_passages: int = 50_000
    """Passages of an answer: queries times ``topk``."""
    max_body_bytes: int = 16 * 2**20
    """Size of a request."""
    max_body_seconds: int = 60
    """How long a request may take to arrive whole."""
    max_pending: int = 8_192
    """Queries that wait; who comes then is told to come again (503)."""
    max_batch: int = 64
    """Queries that are searched for together."""
    cache_bytes: int = 64 * 2**20
    """Size of the answers that are remembered."""

    def __post_init__(self) -> None:
        """Refuse limits by which nothing, or not what is promised, could be answered."""
        for name in self.__slots__:
            if getattr(self, name) < (name != "cache_bytes"):
                raise ConfigurationError(f"{name} ({getattr(self, name)}) is too small.")
        if self.max_queries > self.max_pending:
            raise ConfigurationError(
                f"max_queries ({self.max_queries}) is above max_pending ({self.max_pending}), so "
                "such a request could never be taken: lower the first, or raise the second."
            )
        if not self.topk <= self.max_topk <= self.max_passages:
            raise ConfigurationError(
                f"topk ({self.topk}), max_topk ({self.max_topk}) and max_passages "
                f"({self.max_passages}) must be in ascending order."
            )


class _RefusedError(Exception):
    """A request that is not taken: its status and what is wrong with which field."""

    def __init__(self, status: int, field: tuple[Any, ...], reason: str) -> None:
        super().__init__(reason)
        self.status, self.detail = status, [{"loc": ["body", *field], "msg": reason}]


class Service:
    """The routes, and what they share."""

    def __init__(
        self, retriever: Retriever, *, engine: str, num_passages: int, limits: ServiceLimits
    ) -> None:
        """Serve `retriever`; ``/health`` tells the name of its engine and its size."""
        self._limits = limits
        self._health = {"status": "ok", "engine": engine, "passages": num_passages}
        self._request = _request_model(limits)
        self._batches = Batches(
            retriever, max_pending=limits.max_pending, max_batch=limits.max_batch,
            cache_bytes=limits.cache_bytes,
        )  # fmt: skip
        self._answers: Counter[int] = Counter()
        self.app = Starlette(
            routes=[
                Route("/retrieve", self.retrieve, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            lifespan=self._lifespan,
        )

    async def retrieve(self, request: Request) -> Response:
        """Answer ``POST /retrieve``."""
        response = await self._answer(request)
        self._answers[response.status_code] += 1
        return response

    async def health(self, request: Request) -> Response:
        """Answer ``GET /health``."""
        return JSONResponse(self._health)

    async def metrics(self, request: Request) -> Response:
        """Answer ``GET /metrics``, in Prometheus' text format."""
        counts = self._batches.counts
        lines = [
            "# HELP retrieval_requests_total Requests by status.",
            "# TYPE retrieval_requests_total counter",
            *(f'retrieval_requests_total{{status="{s}"}} {n}' for s, n in self._answers.items()),
            "# HELP retrieval_pending_queries Queries that wait or are searched for.",
            "# TYPE retrieval_pending_queries gauge",
            f"retrieval_pending_queries {self._batches.num_pending}",
            "# HELP retrieval_search_seconds_total Time in the search engine.",
            "# TYPE retrieval_search_seconds_total counter",
            f"retrieval_search_seconds_total {counts['search_microseconds'] / 1e6:.6f}",
        ]
        for name, text in _HELP.items():
            lines.append(f"# HELP retrieval_{name}_total {text}")
            lines.append(f"# TYPE retrieval_{name}_total counter")
            lines.append(f"retrieval_{name}_total {counts[name]}")
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _answer(self, request: Request) -> Response:
        try:
            queries = self._read(await self._body(request))
            found = await self._batches.answer(queries)
        except _RefusedError as error:
            # What is still to come of a request that was not read would be taken for the next one.
            headers = {"Connection": "close"} if error.status in (408, 413) else None
            return JSONResponse({"detail": error.detail}, error.status, headers)
        except BusyError:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return JSONResponse({"detail": "Too many queries are waiting."}, 503, headers)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:  # noqa: BLE001 - what the engine raised, which is logged there
            return JSONResponse({"detail": "The search failed."}, 500)
        return Response(b'{"result": [%b]}' % b", ".join(found), media_type="application/json")

    async def _body(self, request: Request) -> bytes:
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

    def _read(self, body: bytes) -> list[Query]:
        try:
            asked: Any = self._request.model_validate_json(body)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise _RefusedError(422, first["loc"], first["msg"]) from None
        top_k = asked.topk or self._limits.topk
        if len(asked.queries) * top_k > self._limits.max_passages:
            reason = f"queries times topk must be at most {self._limits.max_passages}"
            raise _RefusedError(422, ("topk",), reason)
        return [Query(text, top_k, asked.return_scores) for text in asked.queries]

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        searching = asyncio.create_task(self._batches.run())
        yield
        searching.cancel()


def _request_model(limits: ServiceLimits) -> type[pydantic.BaseModel]:
    text = Annotated[str, pydantic.Field(max_length=limits.max_query_chars)]
    queries = Annotated[list[text], pydantic.Field(max_length=limits.max_queries)]
    topk = Annotated[int, pydantic.Field(ge=1, le=limits.max_topk)]
    config = pydantic.ConfigDict(strict=True)
    return pydantic.create_model(
        "RetrieveRequest",
        __config__=config,
        queries=(queries, ...),
        topk=(topk | None, None),
        return_scores=(bool, False),
    )


def serve(service: Service, *, host: str, port: int) -> None:
    """Serve until the process is told to stop; requests that were taken are answered first.

    Prints the address once it is this process's; port 0 takes a free one.
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
