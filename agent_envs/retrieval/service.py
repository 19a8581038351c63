r"""A retrieval server: Search-R1's ``POST /retrieve`` over any `Retriever`, and ``GET /health``.

Requests that exceed a limit are refused before anything is searched: with 422 (naming the field)
or 413, and by uvicorn with 503 while too many wait.
"""

import json
from typing import Annotated, Final, Self

import pydantic
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agent_envs.retrieval.corpus import Hit, Retriever

DEFAULT_TOPK: Final = 3
"""Passages per query if a request does not say (Search-R1's default)."""
MAX_PASSAGES: Final = 50_000
"""Passages of an answer: queries times ``topk``."""
MAX_BODY_BYTES: Final = 16 * 2**20
MAX_REQUESTS: Final = 8_192
"""Requests at once; more are refused with 503."""


class RetrieveRequest(pydantic.BaseModel):
    """Body of ``POST /retrieve``; Search-R1 sends the queries of a whole batch of rollouts."""

    model_config = pydantic.ConfigDict(strict=True)

    queries: Annotated[
        list[Annotated[str, pydantic.Field(max_length=8_000)]], pydantic.Field(max_length=4_096)
    ]
    topk: Annotated[int, pydantic.Field(ge=1, le=1_000)] | None = None
    return_scores: bool = False

    @pydantic.model_validator(mode="after")
    def _check_size(self) -> Self:
        if len(self.queries) * (self.topk or DEFAULT_TOPK) > MAX_PASSAGES:
            raise ValueError(f"queries times topk must be at most {MAX_PASSAGES}")
        return self


def make_app(retriever: Retriever) -> Starlette:
    """Return a server of `retriever`."""
    one_search = CapacityLimiter(1)  # retrievers need not be thread-safe

    def search(asked: RetrieveRequest) -> str:
        found = [retriever.search(query, asked.topk or DEFAULT_TOPK) for query in asked.queries]
        result = [[_as_json(hit, asked.return_scores) for hit in hits] for hits in found]
        return json.dumps({"result": result})

    async def retrieve(request: Request) -> Response:
        try:
            asked = RetrieveRequest.model_validate_json(await _read_body(request))
        except pydantic.ValidationError as error:
            detail = error.errors(include_url=False, include_context=False, include_input=False)
            return JSONResponse({"detail": detail}, 422)
        body = await to_thread.run_sync(search, asked, limiter=one_search)
        return Response(body, media_type="application/json")

    health = Route("/health", lambda _: JSONResponse({"status": "ok"}))
    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), health])


def _as_json(hit: Hit, with_score: bool) -> object:
    title = " ".join(hit.passage.title.splitlines())  # the first line is the title
    document = {"id": str(hit.index), "contents": f"{title}\n{hit.passage.text}"}
    return {"document": document, "score": hit.score} if with_score else document


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:  # the unread rest would be taken for the next request
            raise HTTPException(413, f"at most {MAX_BODY_BYTES} bytes", {"Connection": "close"})
    return bytes(body)


def serve(retriever: Retriever, *, host: str, port: int) -> None:
    """Serve until the process is stopped, then finish accepted requests; print the address."""
    import uvicorn

    config = uvicorn.Config(
        make_app(retriever), host=host, port=port, access_log=False, log_level="warning",
        limit_concurrency=MAX_REQUESTS,
    )  # fmt: skip
    listening = config.bind_socket()
    name = f"[{host}]" if ":" in host else host
    print(f"http://{name}:{listening.getsockname()[1]}", flush=True)  # noqa: T201
    uvicorn.Server(config).run(sockets=[listening])
