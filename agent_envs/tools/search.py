"""The search tool."""

from collections.abc import Callable, Sequence
from typing import Final

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

    def search(query: str) -> ToolResult:
        """Search the passages for a query.

        Args:
            query: What to look for.
        """
        hits = retriever.search(query[:MAX_QUERY_CHARS], top_k)
        return ToolResult(format_hits(hits, show) or NO_HIT_TEXT, data=hits)

    return Tool(search, timeout=timeout, stateful=stateful)


def format_hits(hits: Sequence[Hit], show: ShowPassage | None = None) -> str:
    """Write hits as the model reads them: ``[1] title``, then the text."""
    passages = [hit.passage if show is None else show(hit.passage) for hit in hits]
    return "\n".join(f"[{rank}] {each.title}\n{each.text}" for rank, each in enumerate(passages, 1))
