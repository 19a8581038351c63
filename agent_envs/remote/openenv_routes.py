"""The HTTP endpoints that OpenEnv expects next to a server's WebSocket (``openenv validate``).

They describe the environment. Episodes run over ``/ws`` alone, so in OpenEnv's terms the HTTP side
is in "production" mode: without ``/reset``, ``/step`` and ``/state``, and with an MCP endpoint,
which has no methods.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from agent_envs.remote.protocol import Step

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

API_VERSION: Final = "1.0.0"
_NO_METHOD: Final = {"code": -32601, "message": "Episodes run over the WebSocket at /ws."}
_MAX_ID_BYTES: Final = 10_000
_OBSERVATION: Final = "text info terminated truncated metrics task_index generator".split()
_STATE: Final = "episode_id task_id step_count".split()


def openenv_routes(description: Mapping[str, Any]) -> "list[Route]":
    """Return ``/metadata``, ``/schema``, ``/mcp`` and ``/openapi.json`` of a served environment."""
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    name = str(description["environment"])
    tools = ", ".join(tool["function"]["name"] for tool in description["tools"]) or "none"
    about = {"name": name, "version": API_VERSION, "description": f"{name}, with tools: {tools}"}
    fields = {"observation": _OBSERVATION, "state": _STATE}
    schemas: dict[str, Any] = {
        kind: {"type": "object", "properties": {name: {} for name in names}}
        for kind, names in fields.items()
    }
    schemas["action"] = Step.model_json_schema()
    documents = {"/metadata": about, "/schema": schemas}
    operations = {
        path: {method: {"summary": path[1:], "responses": {"200": {"description": "JSON"}}}}
        for path, method in {
            **dict.fromkeys(["/health", *documents], "get"),
            "/mcp": "post",
        }.items()
    }
    info = {"title": name, "version": API_VERSION}
    documents["/openapi.json"] = {"openapi": "3.1.0", "info": info, "paths": operations}

    async def answer_mcp(request: "Request") -> "Response":
        answer = {"jsonrpc": "2.0", "id": await _request_id(request), "error": _NO_METHOD}
        # ASCII, because the id may hold lone surrogates
        return Response(json.dumps(answer), media_type="application/json")

    routes = [Route(path, lambda _, d=d: JSONResponse(d)) for path, d in documents.items()]
    return [*routes, Route("/mcp", answer_mcp, methods=["POST"])]


async def _request_id(request: "Request") -> Any:
    """Return the id of a JSON-RPC request; None if it is none, or too long."""
    from starlette.requests import ClientDisconnect

    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MAX_ID_BYTES:
                return None
        call = json.loads(body)
    except (ValueError, RecursionError, ClientDisconnect):
        return None
    number = call.get("id") if isinstance(call, dict) else None
    return number if isinstance(number, str | int) else None
