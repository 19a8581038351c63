"""Tools to read pages by title, and to find text in them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from agent_envs.core.tool import Tool, ToolError, quoted
from agent_envs.retrieval import Page

MAX_SUGGESTIONS: Final = 5


class PageReader:
    """The tools ``read`` and ``find_in_page``, and the page that is open."""

    def __init__(self, show: Callable[[Page], Page] | None = None) -> None:
        """Start without pages; `show` transforms each page before the model sees it."""
        self._show = show
        self.take({})

    def take(self, pages: Mapping[str, Sequence[Page]]) -> None:
        """Read from `pages`, by title."""
        self._pages = pages
        self._by_folded_title = {folded(title): title for title in pages}
        self.close()

    def close(self) -> None:
        """Close the open page."""
        self._open: Sequence[Page] = ()

    @property
    def tools(self) -> dict[str, Sequence[Tool]]:
        """The tools by name."""
        return {
            "read": (Tool(self.read, timeout=None),),
            "find_in_page": (Tool(self.find_in_page, timeout=None),),
        }

    def read(self, title: str) -> str:
        """Read a page, each sentence with its number.

        Args:
            title: The page's title, as a search shows it.
        """
        known = title if title in self._pages else self._by_folded_title.get(folded(title))
        if known is None:
            raise ToolError(f"There is no page {quoted(title)}.{self._suggestions(title)}")
        pages = self._pages[known]
        self._open = pages if self._show is None else tuple(map(self._show, pages))
        return "\n\n".join(_numbered(page) for page in self._open)

    def find_in_page(self, text: str) -> str:
        """Find the sentences of the page read last that hold a text.

        Args:
            text: What to look for; the case does not matter.
        """
        if not self._open:
            raise ToolError("No page is open. Call read(title) first.")
        wanted = folded(text)
        lines = [
            f"[{number}] {sentence.strip()}"
            for page in self._open
            for number, sentence in enumerate(page.sentences)
            if wanted and wanted in folded(sentence)
        ]
        return "\n".join(lines) or f"{self._open[0].title} does not hold {quoted(text)}."

    def _suggestions(self, title: str) -> str:
        words = set(folded(title).split())
        shared = {
            name: len(words & set(known.split())) for known, name in self._by_folded_title.items()
        }
        near = [name for name, num_shared in shared.items() if num_shared]
        near.sort(key=lambda name: (-shared[name], len(name), name))
        return f" Titles like it: {'; '.join(near[:MAX_SUGGESTIONS])}." if near else ""


def folded(text: str) -> str:
    """Return `text` with normalised case and white space."""
    return " ".join(text.casefold().split())


def _numbered(page: Page) -> str:
    lines = [f"[{number}] {sentence.strip()}" for number, sentence in enumerate(page.sentences)]
    return "\n".join([page.title, *lines])
