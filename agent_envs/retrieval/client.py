r"""A retriever that asks a server, by Search-R1's protocol.

``POST /retrieve {"queries": [str], "topk": int, "return_scores": true}`` gives ``{"result":
[[{"document": {"contents": "title\ntext"}, "score": float}]]}`` (Search-R1, arXiv 2503.09516).
"""

import json
import logging
import math
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.core.extras import require_extra
from agent_envs.core.tool import ToolError
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.corpus import Hit, Passage

if TYPE_CHECKING:
    import httpx

UNAVAILABLE_TEXT: Final = (
    "The search is not available now. Search again later, or go on without it."
)
REFUSED_TEXT: Final = "The search does not take this query. Search for something shorter."
TIMEOUT_SECONDS: Final = 20.0
MAX_ANSWER_BYTES: Final = 32 * 2**20
_PAUSES: Final = (0.05, 2.0)
"""Seconds before the first repetition, and at most; they double."""
_REFUSALS: Final = frozenset({400, 413, 422})
"""What a repetition would not change."""
_LOGGER: Final = logging.getLogger(__name__)


class RetrievalClient:
    """A `Retriever` behind a URL; safe to use from many threads, and copied by its URL.

    What fails (no connection, an answer that is none, a server that is busy or restarts) is asked
    again until the time is up; then the model is told that there is no search.
    """

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Ask the server at `url`, which nothing is sent to yet.

        Args:
            url: Such as ``http://127.0.0.1:8000``, with or without ``/retrieve``.
            timeout_seconds: How long a search may take, with all its repetitions; one attempt takes
                at most half of it.

        Raises:
            MissingExtraError: If the library ``httpx`` is not installed.
            ConfigurationError: If `url` is no http address, or the time not positive.
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
        """Pickle, and copy, by URL."""
        return _remake, (self.url, self._timeout_seconds)

    def check(self) -> None:
        """Ask something, to be told early of a server that is not there.

        Raises:
            DataError: If it gives no answer; names the URL.
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
            ToolError: If the server gives no answer in time, or refuses the query; the message is
                for the model, its cause says what happened.
        """
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        said = query.encode("utf-8", "replace").decode()  # JSON has no half of a surrogate pair
        body = json.dumps({"queries": [said], "topk": top_k, "return_scores": True}).encode()
        deadline = time.monotonic() + self._timeout_seconds
        pause, longest = _PAUSES
        while True:
            try:
                return self._ask(body, top_k, deadline)
            except _FailedError as error:
                wait = max(pause, error.retry_after)
                if not error.is_final and time.monotonic() + wait < deadline:
                    time.sleep(wait)
                    pause = min(2 * pause, longest)
                    continue
                _LOGGER.warning("%s: %s", self.url, error)
                text = REFUSED_TEXT if error.is_final else UNAVAILABLE_TEXT
                raise ToolError(text) from error

    def _ask(self, body: bytes, top_k: int, deadline: float) -> list[Hit]:
        seconds = min(self._timeout_seconds / 2, max(deadline - time.monotonic(), 0.001))
        try:  # httpx limits the wait for each piece only, and a server may send many
            hits: list[Hit]
            hits = call_with_deadline(lambda: self._post(body, top_k, seconds), seconds)
        except TimeoutError as error:
            raise _FailedError(str(error)) from error
        return hits

    def _post(self, body: bytes, top_k: int, seconds: float) -> list[Hit]:
        import httpx

        until, data = time.monotonic() + seconds, bytearray()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            with self._http.stream(
                "POST", f"{self.url}/retrieve", content=body, headers=headers, timeout=seconds
            ) as response:
                for piece in response.iter_raw():  # unpacked, a short one could become endless
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES or time.monotonic() > until:
                        raise _FailedError(f"the answer is too long: {len(data)} bytes and more")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _FailedError(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _FailedError(
                f"status {response.status_code}: {bytes(data[:200])!r}",
                is_final=response.status_code in _REFUSALS,
                retry_after=_seconds(response.headers.get("Retry-After", "")),
            )
        return _read_hits(bytes(data), top_k)

    @property
    def _http(self) -> "httpx.Client":
        """The connections of this process: a forked one must not write to those of its parent."""
        import httpx

        if self._client is None or self._client[0] != os.getpid():
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            client = httpx.Client(limits=limits)
            self._client = (os.getpid(), client)
            weakref.finalize(self, client.close)
        return self._client[1]


class _FailedError(Exception):
    """An attempt without an answer."""

    def __init__(self, reason: str, *, is_final: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.is_final, self.retry_after = is_final, retry_after


def _remake(url: str, timeout_seconds: float) -> RetrievalClient:
    return RetrievalClient(url, timeout_seconds=timeout_seconds)


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), _PAUSES[1])
    except ValueError:  # a date, or nothing
        return 0.0


def _read_hits(data: bytes, top_k: int) -> list[Hit]:
    try:
        (found,) = json.loads(data)["result"]
        if not isinstance(found, list):
            raise TypeError("a search finds a list")
        return [_read_hit(each, rank) for rank, each in enumerate(found[:top_k])]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise _FailedError(f"no answer to a search: {data[:200]!r} ({reason})") from e


def _read_hit(hit: Any, rank: int) -> Hit:
    contents, score = hit["document"]["contents"], float(hit["score"])
    number = str(hit["document"].get("id", ""))
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    title, _, text = contents.partition("\n")
    # Servers may name passages by anything, or not at all.
    index = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else rank
    return Hit(Passage(title, text), index, score)
