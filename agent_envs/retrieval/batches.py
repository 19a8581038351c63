"""Queries of concurrent requests, searched for together; bounded, and remembered."""

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from agent_envs.retrieval.corpus import Hit, Retriever, search_many

_LOGGER: Final = logging.getLogger(__name__)


class Query(NamedTuple):
    """What is looked up."""

    text: str
    top_k: int
    with_scores: bool


class BusyError(Exception):
    """Too much is waiting already."""


class Batches:
    """Searches in a thread, for all that wait at once; equal queries are searched for once."""

    def __init__(
        self, retriever: Retriever, *, max_pending: int, max_batch: int, cache_bytes: int
    ) -> None:
        """Search in `retriever`.

        Args:
            retriever: What searches; only ever called by one thread at a time.
            max_pending: How many different queries may wait.
            max_batch: How many are searched for together.
            cache_bytes: How many bytes of answers, and of their queries, are remembered.
        """
        self._retriever, self._max_batch = retriever, max_batch
        self._max_pending, self._cache_bytes = max_pending, cache_bytes
        self._pending: dict[Query, asyncio.Future[bytes]] = {}
        self._searching: dict[Query, asyncio.Future[bytes]] = {}
        self._cache: OrderedDict[Query, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._wake = asyncio.Event()
        self.counts: Counter[str] = Counter()
        """What was done so far: queries, cache hits, batches, searches and their seconds."""

    @property
    def num_pending(self) -> int:
        """How many queries wait or are searched for."""
        return len(self._pending) + len(self._searching)

    async def answer(self, queries: Sequence[Query]) -> list[bytes]:
        """Return what each query finds, as JSON: a list of passages, with or without scores.

        Raises:
            BusyError: If too many queries wait; then none of these does.
            Exception: What the search raised.
        """
        self.counts["queries"] += len(queries)
        known = {query: self._remembered(query) for query in dict.fromkeys(queries)}
        new = [query for query, found in known.items() if found is None]
        waiting = [q for q in new if q not in self._pending and q not in self._searching]
        if len(self._pending) + len(waiting) > self._max_pending:
            raise BusyError
        self.counts["cache_hits"] += len(queries) - len(waiting)
        for query in waiting:
            self._pending[query] = asyncio.get_running_loop().create_future()
        self._wake.set()
        futures = {q: self._pending.get(q) or self._searching[q] for q in new}
        if futures:
            await asyncio.wait(futures.values())  # which cancels none of them, unlike gather
        answers = {query: found for query, found in known.items() if found is not None}
        answers |= {query: future.result() for query, future in futures.items()}
        return [answers[query] for query in queries]

    async def run(self) -> None:
        """Search for what waits, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                top_k = next(iter(self._pending)).top_k
                same = (query for query in self._pending if query.top_k == top_k)
                batch = list(itertools.islice(same, self._max_batch))
                self._searching = {query: self._pending.pop(query) for query in batch}
                results = await asyncio.to_thread(self._search, batch)
                for query, result in zip(batch, results, strict=True):
                    future = self._searching.pop(query)
                    if isinstance(result, Exception):
                        future.set_exception(result)
                        future.exception()  # seen: all who waited may have gone
                    else:
                        self._remember(query, result)
                        future.set_result(result)

    def _search(self, batch: Sequence[Query]) -> list[bytes | Exception]:
        started = time.perf_counter()
        texts, top_k = [query.text for query in batch], batch[0].top_k
        results: list[bytes | Exception]
        try:
            found = search_many(self._retriever, texts, top_k)
            results = [_as_json(hits, q) for hits, q in zip(found, batch, strict=True)]
        except Exception as error:
            _LOGGER.exception("The search failed.")
            # One query must not fail the others.
            several = len(batch) > 1
            results = [self._search([q])[0] for q in batch] if several else [error]
            return results
        self.counts["batches"] += 1
        self.counts["searches"] += len(batch)
        self.counts["search_microseconds"] += round((time.perf_counter() - started) * 1e6)
        return results

    def _remembered(self, query: Query) -> bytes | None:
        with contextlib.suppress(KeyError):
            self._cache.move_to_end(query)
        return self._cache.get(query)

    def _remember(self, query: Query, result: bytes) -> None:
        self._cache[query] = result
        self._cached_bytes += _size(query, result)
        while self._cached_bytes > self._cache_bytes:
            self._cached_bytes -= _size(*self._cache.popitem(last=False))


def _size(query: Query, result: bytes) -> int:
    return 4 * len(query.text) + len(result)  # a character takes four bytes at most


def _as_json(hits: Sequence[Hit], query: Query) -> bytes:
    found: list[object] = []
    for hit in hits:
        title = " ".join(hit.passage.title.splitlines())  # the first line is the title
        document = {"id": str(hit.index), "contents": f"{title}\n{hit.passage.text}"}
        found.append({"document": document, "score": hit.score} if query.with_scores else document)
    return json.dumps(found).encode()
