r"""A retriever behind a server that speaks Search-R1's protocol.

``POST /retrieve {"queries": [str], "topk": int, "return_scores": true}`` gives ``{"result":
[[{"document": {"contents": "title\ntext"}, "score": float}]]}`` (Search-R1, arXiv 2503.09516).
"""

import json
import logging
import math
import time
from typing import Any, Final

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.core.lookup import require_extra
from agent_envs.core.model_server import check_url
from agent_envs.core.tool import ToolError
from agent_envs.errors import DataError
from agent_envs.retrieval.corpus import Hit, Passage

UNAVAILABLE_TEXT: Final = (
    "The search is not available now. Search again later, or go on without it."
)
REFUSED_TEXT: Final = "The search does not take this query. Search for something shorter."
MAX_ANSWER_BYTES: Final = 32 * 2**20
_PAUSE_SECONDS: Final = 0.2
_FINAL_STATUSES: Final = (400, 413, 422)
"""Refusals that a retry would not change."""


class RetrievalClient:
    """A `Retriever` behind a URL; thread-safe.

    A failed request (no connection, an invalid answer, a busy server) is retried until the timeout;
    then the model reads that the search is not available.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 20.0) -> None:
        """Use the server at `url`; nothing is sent yet.

        Args:
            url: Such as ``http://127.0.0.1:8000``, with or without ``/retrieve``.
            timeout_seconds: Limit of a search with all retries; one attempt has half of it.
        """
        require_extra("serve", "A retrieval server", "httpx")
        check_url("url", url)
        self.url = url.rstrip("/").removesuffix("/retrieve")
        self._timeout_seconds = timeout_seconds

    def check(self) -> None:
        """Raise `DataError`, which names the URL, unless the server answers."""
        try:
            self.search("", 1)
        except ToolError as error:
            raise DataError(
                f"{self.url} does not answer as a retrieval server ({error.__cause__}). Start one, "
                "such as Search-R1's, or pass another retriever=."
            ) from error

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`.

        Raises:
            ToolError: If the server gives no answer in time, or refuses the query.
        """
        import httpx

        text = query.encode("utf-8", "replace").decode()  # JSON has no half of a surrogate pair
        body = {"queries": [text], "topk": top_k, "return_scores": True}
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                # httpx limits the wait for each piece only, and a server may send many
                answer = call_with_deadline(lambda: self._ask(body), self._timeout_seconds / 2)
                return _read_hits(answer, top_k)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
                response = getattr(error, "response", None)
                if response is not None and response.status_code in _FINAL_STATUSES:
                    raise ToolError(REFUSED_TEXT) from error
                if time.monotonic() + _PAUSE_SECONDS >= deadline:
                    logging.getLogger(__name__).warning("%s: %s", self.url, error)
                    raise ToolError(UNAVAILABLE_TEXT) from error
            time.sleep(_PAUSE_SECONDS)

    def _ask(self, body: dict[str, Any]) -> bytes:
        import httpx

        data, until = bytearray(), time.monotonic() + self._timeout_seconds
        # A connection per request: nothing to share with forks, or to close.
        with httpx.stream(
            "POST", f"{self.url}/retrieve", json=body, headers={"Accept-Encoding": "identity"},
            timeout=self._timeout_seconds / 2, verify=self.url.startswith("https:"),
        ) as response:  # fmt: skip
            for piece in response.iter_raw():  # not unpacked: it could grow to any size
                data += piece
                if len(data) > MAX_ANSWER_BYTES or time.monotonic() > until:
                    raise ValueError(f"the answer is too long: over {len(data)} bytes")
        response.raise_for_status()
        return bytes(data)


def _read_hits(data: bytes, top_k: int) -> list[Hit]:
    try:
        (found,) = json.loads(data)["result"]
        return [_read_hit(found[rank], rank) for rank in range(min(top_k, len(found)))]
    except Exception as error:  # whatever foreign data may cause
        raise ValueError(f"invalid answer: {data[:200]!r} ({error!r})") from error


def _read_hit(hit: Any, rank: int) -> Hit:
    contents, score = hit["document"]["contents"], float(hit["score"])
    number = str(hit["document"].get("id", ""))
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    title, _, text = contents.partition("\n")
    # Servers may use any ids, or none.
    index = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else rank
    return Hit(Passage(title, text), index, score)
