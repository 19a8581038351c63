r"""A retriever behind a server that speaks Search-R1's protocol.

``POST /retrieve {"queries": [str], "topk": int, "return_scores": true}`` gives ``{"result":
[[{"document": {"contents": "title\ntext"}, "score": float}]]}`` (Search-R1, arXiv 2503.09516).
"""

import functools
import json
import logging
import math
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.core.lookup import require_extra
from agent_envs.core.tool import ToolError
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.corpus import Hit, Passage, check_top_k

if TYPE_CHECKING:
    import httpx

UNAVAILABLE_TEXT: Final = (
    "The search is not available now. Search again later, or go on without it."
)
REFUSED_TEXT: Final = "The search does not take this query. Search for something shorter."
TIMEOUT_SECONDS: Final = 20.0
MAX_ANSWER_BYTES: Final = 32 * 2**20
_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 2.0
_FINAL_STATUSES: Final = frozenset({400, 413, 422})
"""Refusals that a retry would not change."""
_LOGGER: Final = logging.getLogger(__name__)


class RetrievalClient:
    """A `Retriever` behind a URL; thread-safe, and pickled by its URL.

    A failed request (no connection, an invalid answer, a busy server) is retried until the timeout;
    then the model reads that the search is not available.
    """

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Use the server at `url`; nothing is sent yet.

        Args:
            url: Such as ``http://127.0.0.1:8000``, with or without ``/retrieve``.
            timeout_seconds: Limit of a search with all retries; one attempt has half of it.

        Raises:
            MissingExtraError: If the library ``httpx`` is not installed.
            ConfigurationError: If `url` is not an http address, or the timeout is not positive.
        """
        require_extra("serve", "A retrieval server", "httpx")
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"url must begin with http:// or https://, not {url!r}.")
        if not timeout_seconds > 0:
            raise ConfigurationError(f"timeout_seconds must be above 0, not {timeout_seconds}.")
        self.url = url.rstrip("/").removesuffix("/retrieve")
        self._timeout_seconds = timeout_seconds
        self._client: tuple[int, httpx.Client] | None = None

    def __reduce__(self) -> Any:
        """Pickle and copy by URL."""
        return _remake, (self.url, self._timeout_seconds)

    def check(self) -> None:
        """Send a request, so that a wrong URL is an error now.

        Raises:
            DataError: If there is no valid answer; names the URL.
        """
        try:
            self.search("", 1)
        except ToolError as error:
            raise DataError(
                f"{self.url} does not answer as a retrieval server ({error.__cause__}). Start one "
                "with `python -m agent_envs.retrieval serve INDEX`, or pass another retriever=."
            ) from error

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`.

        Raises:
            ToolError: If the server gives no answer in time, or refuses the query. The message is
                for the model; its cause has the reason.
        """
        check_top_k(top_k)
        text = query.encode("utf-8", "replace").decode()  # JSON has no half of a surrogate pair
        body = json.dumps({"queries": [text], "topk": top_k, "return_scores": True}).encode()
        deadline = time.monotonic() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            seconds = min(self._timeout_seconds / 2, max(deadline - time.monotonic(), 0.001))
            try:
                # httpx limits the wait for each piece only, and a server may send many
                found = call_with_deadline(functools.partial(self._post, body, seconds), seconds)
                return _read_hits(found, top_k)
            except (_FailedError, TimeoutError) as error:
                is_final = isinstance(error, _FailedError) and error.is_final
                if is_final or time.monotonic() + pause >= deadline:
                    _LOGGER.warning("%s: %s", self.url, error)
                    raise ToolError(REFUSED_TEXT if is_final else UNAVAILABLE_TEXT) from error
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _post(self, body: bytes, seconds: float) -> bytes:
        import httpx

        until, data = time.monotonic() + seconds, bytearray()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            with self._http.stream(
                "POST", f"{self.url}/retrieve", content=body, headers=headers, timeout=seconds
            ) as response:
                for piece in response.iter_raw():  # not unpacked: it could grow to any size
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES or time.monotonic() > until:
                        raise _FailedError(f"the answer is too long: over {len(data)} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _FailedError(f"{type(error).__name__}: {error}") from error
        if (status := response.status_code) != 200:
            is_final = status in _FINAL_STATUSES
            raise _FailedError(f"status {status}: {bytes(data[:200])!r}", is_final=is_final)
        return bytes(data)

    @property
    def _http(self) -> "httpx.Client":
        """The connections of this process; a forked one must not use those of its parent."""
        import httpx

        if self._client is None or self._client[0] != os.getpid():
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            client = httpx.Client(limits=limits)
            self._client = (os.getpid(), client)
            weakref.finalize(self, client.close)
        return self._client[1]


class _FailedError(Exception):
    """A failed attempt."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


def _remake(url: str, timeout_seconds: float) -> RetrievalClient:
    return RetrievalClient(url, timeout_seconds=timeout_seconds)


def _read_hits(data: bytes, top_k: int) -> list[Hit]:
    try:
        (found,) = json.loads(data)["result"]
        if not isinstance(found, list):
            raise TypeError("the result of a query must be a list")
        return [_read_hit(each, rank) for rank, each in enumerate(found[:top_k])]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise _FailedError(f"invalid answer: {data[:200]!r} ({reason})") from e


def _read_hit(hit: Any, rank: int) -> Hit:
    contents, score = hit["document"]["contents"], float(hit["score"])
    number = str(hit["document"].get("id", ""))
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    title, _, text = contents.partition("\n")
    # Servers may use any ids, or none.
    index = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else rank
    return Hit(Passage(title, text), index, score)
