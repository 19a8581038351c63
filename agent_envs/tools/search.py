"""The search tool: passages for a query, best first."""

from collections.abc import Callable, Sequence
from typing import Final

from agent_envs.core.tool import Tool, ToolResult
from agent_envs.retrieval import Hit, Passage, Retriever

NO_HIT_TEXT: Final = "No passage matches this query."
MAX_QUERY_CHARS: Final = 8_000
"""What stands after them in a query is not searched for: each word costs a look at its passages."""
ShowPassage = Callable[[Passage], Passage]
"""Returns a passage as the model is to see it."""


def make_search_tool(
    retriever: Retriever,
    *,
    top_k: int,
    show: ShowPassage | None = None,
    timeout: float | None = None,
    stateful: bool = False,
) -> Tool:
    """Make the tool ``search(query)`` over `retriever`; the model sees what `show` returns.

    The result's `data` is the list of `Hit`, best first, `top_k` at most.

    Args:
        retriever: Where to search.
        top_k: How many passages to show at most.
        show: What the model sees of each.
        timeout: Seconds a search may take. None where the retriever is in memory and quick: a
            thread of its own per call would cost more than the search.
        stateful: Whether `show` keeps count of what it showed; see `Tool`.
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
    """Write hits as the model reads them: ``[1] title``, the text below."""
    passages = [hit.passage if show is None else show(hit.passage) for hit in hits]
    return "\n".join(f"[{rank}] {each.title}\n{each.text}" for rank, each in enumerate(passages, 1))
