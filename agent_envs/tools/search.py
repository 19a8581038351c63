"""The search tool."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from agent_envs.core.tool import Tool, ToolResult
from agent_envs.retrieval import Hit, Passage, Retriever

NO_HIT_TEXT: Final = "No passage matches this query."
MAX_QUERY_CHARS: Final = 8_000
"""Longer queries are cut: each word costs time."""
ShowPassage = Callable[[Passage], Passage]
"""Transforms a passage before the model sees it."""


def make_search_tool(
    retriever: Retriever,
    *,
    top_k: int,
    show: ShowPassage | None = None,
    timeout: float | None = None,
    stateful: bool = False,
) -> Tool:
    """Make the tool ``search(query)``, whose results have a list of `Hit` as `data`.

    Args:
        retriever: The search engine.
        top_k: Maximal number of passages.
        show: Transforms each passage before the model sees it.
        timeout: Seconds of a search; None for a fast retriever in memory, which runs without a
            thread.
        stateful: Whether `show` changes state; see `Tool`.
    """
    return _SearchTool(retriever, top_k, show, timeout=timeout, stateful=stateful)


class _SearchTool(Tool):
    """A search engine with its settings, which a copy of its environment copies as well."""

    def __init__(
        self, retriever: Retriever, top_k: int, show: ShowPassage | None, **options: Any
    ) -> None:
        self._retriever, self._top_k, self._show = retriever, top_k, show
        super().__init__(self.search, **options)

    def search(self, query: str) -> ToolResult:
        """Search the passages for a query.

        Args:
            query: What to look for.
        """
        hits = self._retriever.search(query[:MAX_QUERY_CHARS], self._top_k)
        return ToolResult(format_hits(hits, self._show) or NO_HIT_TEXT, data=hits)

    def has_state_outside(self, env: object) -> bool:
        return self.stateful


def format_hits(hits: Sequence[Hit], show: ShowPassage | None = None) -> str:
    """Write hits as the model reads them: ``[1] title``, then the text."""
    passages = [hit.passage if show is None else show(hit.passage) for hit in hits]
    return "\n".join(f"[{rank}] {each.title}\n{each.text}" for rank, each in enumerate(passages, 1))
