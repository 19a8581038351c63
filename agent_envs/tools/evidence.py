"""Structured search: sub-questions, filtered queries, a log of queries, a table of evidence.

After the tools of EigentSearch-Q+. All state is bounded.
"""

import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from agent_envs.core.tool import Tool, ToolError, ToolResult, quoted
from agent_envs.retrieval import Hit, Retriever
from agent_envs.tools.pages import folded
from agent_envs.tools.search import MAX_QUERY_CHARS, NO_HIT_TEXT, ShowPassage, format_hits

MAX_QUESTIONS: Final = 12
MAX_ROWS: Final = 40
MAX_QUERIES: Final = 40
MAX_CHARS: Final = 300
"""Longest stored sub-question, claim or query."""
_NUM_CANDIDATES: Final = 10
"""Passages that a filter examines per passage that it returns."""


class Evidence(NamedTuple):
    """A row of the table: the number of its sub-question, and whether its passage supports it."""

    claim: str
    title: str
    question: int | None
    supports: bool


class EvidenceTable:
    """Queries and evidence of one episode; its methods are the tools."""

    def __init__(
        self,
        retriever: Retriever,
        *,
        top_k: int,
        show: ShowPassage | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take the arguments of `make_search_tool`."""
        self._retriever, self._top_k, self._show, self._timeout = retriever, top_k, show, timeout
        self.clear()

    def clear(self) -> None:
        """Remove all entries."""
        self.questions: list[str] = []
        self.rows: list[Evidence] = []
        self._queries: list[str] = []
        self._num_queries = 0
        self._seen: set[int] = set()
        self._titles: dict[str, str] = {}

    @property
    def tools(self) -> dict[str, Sequence[Tool]]:
        """The tools by name."""
        quick = (self.decompose, self.query_log, self.add_evidence, self.evidence_table)
        decompose, *others = [Tool(function, timeout=None, stateful=True) for function in quick]
        search = Tool(self.filtered_search, timeout=self._timeout, stateful=True)
        return {"evidence": (decompose, search, *others)}

    def log(self, query: str, hits: Sequence[Hit]) -> None:
        """Record a search and its results."""
        found = set(map(_checksum, hits))
        titles = list(dict.fromkeys(_short(hit.passage.title) for hit in hits))
        self._num_queries += 1
        self._queries.append(
            f"[{self._num_queries}] {_short(query)}: {len(found - self._seen)} new of "
            f"{'; '.join(titles) or 'nothing'}"
        )
        self._seen |= found
        self._titles |= {folded(title): title for title in titles}
        del self._queries[:-MAX_QUERIES]

    def decompose(self, questions: list[str]) -> str:
        """Write down the sub-questions that lead to the answer, in the order to ask them.

        Args:
            questions: The sub-questions; they replace those written down before.
        """
        kept = [_short(question) for question in questions if question.strip()]
        if not 1 <= len(kept) <= MAX_QUESTIONS:
            raise ToolError(f"Write 1 to {MAX_QUESTIONS} sub-questions, not {len(kept)}.")
        self.questions = kept
        self.rows = [row for row in self.rows if row.question is None or row.question <= len(kept)]
        return self._open_questions()

    def filtered_search(
        self,
        query: str,
        must_have: list[str] | None = None,
        must_not_have: list[str] | None = None,
        only_new: bool = False,
    ) -> ToolResult:
        """Search the passages for a query, and leave out those that do not fit.

        Args:
            query: What to look for.
            must_have: Words or phrases that a passage or its title must hold, all of them.
            must_not_have: Words or phrases that it must not hold, none of them.
            only_new: Leave out what a search has found before.
        """
        wanted = [folded(text) for text in (must_have or [])[:MAX_QUESTIONS] if text.strip()]
        refused = [folded(text) for text in (must_not_have or [])[:MAX_QUESTIONS] if text.strip()]

        def fits(hit: Hit) -> bool:
            text = folded(f"{hit.passage.title}\n{hit.passage.text}")
            return (
                not (only_new and _checksum(hit) in self._seen)
                and all(each in text for each in wanted)
                and not any(each in text for each in refused)
            )

        found = self._retriever.search(query[:MAX_QUERY_CHARS], self._top_k * _NUM_CANDIDATES)
        hits = list(filter(fits, found))[: self._top_k]
        return ToolResult(format_hits(hits, self._show) or NO_HIT_TEXT, data=hits)

    def query_log(self) -> str:
        """Show the searches so far, and what they found."""
        return "\n".join(self._queries) or "There was no search yet."

    def add_evidence(
        self, claim: str, title: str, question: int | None = None, supports: bool = True
    ) -> str:
        """Add a row to the table of evidence.

        Args:
            claim: What the passage says, in a sentence.
            title: The passage's title; a search must have shown it.
            question: The number of the sub-question that it answers.
            supports: Whether the passage speaks for the claim; false if it speaks against it.
        """
        if not claim.strip():
            raise ToolError("A row of evidence needs a claim.")
        if len(self.rows) >= MAX_ROWS:
            raise ToolError(f"The table is full: it holds {MAX_ROWS} rows.")
        known = self._titles.get(folded(_short(title)))
        if known is None:
            raise ToolError(f"No search has shown {quoted(title)}. Search for it first.")
        if question is not None and not 1 <= question <= len(self.questions):
            raise ToolError(
                f"There is no sub-question {question} (there are {len(self.questions)}). Write "
                "them down with decompose."
            )
        self.rows.append(Evidence(_short(claim), known, question, supports))
        return f"Kept as row {len(self.rows)}. {self._open_questions()}".strip()

    def evidence_table(self) -> str:
        """Show the table of evidence, and which sub-questions have none."""
        lines = [
            f"[{number}] {'' if row.question is None else f'question {row.question} | '}{row.claim}"
            f" | {row.title} | {'for' if row.supports else 'against'}"
            for number, row in enumerate(self.rows, 1)
        ]
        return "\n".join(
            [*(lines or ["There is no evidence yet."]), self._open_questions()]
        ).strip()

    def _open_questions(self) -> str:
        answered = {row.question for row in self.rows if row.supports}
        numbered = enumerate(self.questions, 1)
        lines = [f"{number}. {text}" for number, text in numbered if number not in answered]
        if lines:
            return "\n".join(["Without evidence:", *lines])
        return "Every question has evidence." if self.questions else ""


def _checksum(hit: Hit) -> int:
    return zlib.crc32(f"{hit.passage.title}\n{hit.passage.text}".encode("utf-8", "replace"))


def _short(text: str) -> str:
    return " ".join(text[: MAX_CHARS * 2].split())[:MAX_CHARS]
