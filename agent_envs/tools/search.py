"""The search tool: passages for a query, best first."""

from typing import Final

from agent_envs.core.tool import Tool, ToolResult
from agent_envs.retrieval import Hit, Retriever

NO_HIT_TEXT: Final = "No passage matches this query."
MAX_QUERY_CHARS: Final = 8_000
"""What stands after them in a query is not searched for: each word costs a look at its passages."""


def make_search_tool(retriever: Retriever, *, top_k: int) -> Tool:
    """Make the tool ``search(query)`` over `retriever`.

    The result's `data` is the list of `Hit`, best first, `top_k` at most.
    """

    def search(query: str) -> ToolResult:
        """Search the passages for a query.

        Args:
            query: What to look for.
        """
        hits = retriever.search(query[:MAX_QUERY_CHARS], top_k)
        return ToolResult(format_hits(hits) or NO_HIT_TEXT, data=hits)

    # In memory and quick: a thread of its own per call would cost more than the search.
    return Tool(search, timeout=None)


def format_hits(hits: list[Hit]) -> str:
    """Write hits as the model reads them: ``[1] title``, the text below."""
    return "\n".join(
        f"[{rank}] {hit.passage.title}\n{hit.passage.text}" for rank, hit in enumerate(hits, 1)
    )
