"""WebShop: buy a product in a simulated shop, which runs as a separate server."""

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.model_server import check_url
from agent_envs.core.rewards import SCORE, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolError, quoted
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import DataError

SPLITS: Final[Mapping[str, range]] = {
    "test": range(500),
    "validation": range(500, 1500),
    "train": range(1500, 6910),
}
"""Goals of each split, as in the paper's repository."""
_SUBPAGES: Final = ("Description", "Features", "Reviews", "Attributes")
_SCORE_TEXT: Final = "Your score (min 0.0, max 1.0)"
_HIDDEN: Final = ("style", "script", "head", "title", "meta", "[document]")
_SECONDS: Final = 30.0
_MAX_PAGE_CHARS: Final = 500_000
_UNCLOSED: Final = re.compile(r"<(?=[^<>]*(?:<|\Z))")


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the shop."""

    kind: str = "index"
    query: str = ""
    number: int = 1
    item: str = ""
    subpage: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def path(self, session: str) -> str:
        options = urllib.parse.quote(str(dict(self.options)), safe="")
        results = f"{urllib.parse.quote(self.query or ' ', safe='')}/{self.number}"
        return {
            "index": f"/{session}",
            "results": f"/search_results/{session}/{results}",
            "item": f"/item_page/{session}/{self.item}/{results}/{options}",
            "subpage": f"/item_sub_page/{session}/{self.item}/{results}/{self.subpage}/{options}",
            "done": f"/done/{session}/{self.item}/{options}",
        }[self.kind]


@dataclass(slots=True)
class _Shown:
    """Content of a page."""

    text: str
    buttons: set[str] = field(default_factory=set)
    items: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)
    """Option -> its kind, such as colour."""
    score: float | None = None


class WebShopEnv(ToolEnv):
    """WebShop (Yao et al., 2022, arXiv 2207.01206) as an environment, against its server.

    Task: find and buy a product that fits an instruction. Tools: ``search(keywords)`` and
    ``click(button)``: a product's number, an option, or a button of the page. Reward terms:
    ``score`` (WebShop's own reward, outcome) and ``format`` (process); success is a full score. The
    episode ends with "Buy Now", or with an answer, which gives up.

    Start the server of https://github.com/princeton-nlp/WebShop (``./run_dev.sh``) first.

    Version history: v0, first version.
    """

    reward_functions = {**noted_terms("score"), "format": format_term}
    # Mistakes cost nothing: otherwise a solution could earn less than a score near 1.
    default_rewards = {"score": 1.0}
    term_earnings = {"score": SCORE}
    outcome_terms = frozenset({"score"})
    tool_signatures = ("search(keywords)", "click(button)")
    metric_names = ("success", "score", *ToolEnv.metric_names)
    data_source = "the goals of a WebShop server; licence: see its repository"
    not_in_snapshots = frozenset({"_client"})
    default_system_prompt = (
        "You are in a web shop. Buy what the instruction asks for: search, click a product, click "
        'the options that fit, then click "Buy Now".'
    )

    def __init__(
        self, *, base_url: str = "http://127.0.0.1:3000", split: str = "train", **shared: Any
    ) -> None:
        """Use a server.

        Args:
            base_url: Address of the server.
            split: ``"train"``, ``"validation"`` or ``"test"``.
            shared: Arguments of `ToolEnv`.
        """
        require_extra("webshop", "AgentR1/WebShop-v0", "httpx", "bs4")
        check_url("base_url", base_url)
        import httpx

        self._goals = lookup(SPLITS, split, kind="split")
        self._client = httpx.Client(base_url=base_url, timeout=_SECONDS, follow_redirects=True)
        tools = [Tool(self.search, timeout=None), Tool(self.click, timeout=None)]
        super().__init__(default_tools=tools, **shared)

    @property
    def num_tasks(self) -> int:
        return len(self._goals)

    def get_task(self, index: int) -> Task:
        self._session = f"fixed_{self._goals[index]}"
        self._page = _Page()
        try:
            self._shown = self._fetch(self._page)
        except ToolError as error:
            raise DataError(
                f"{self._client.base_url}: the WebShop server did not answer ({error}). Start it, "
                "or pass base_url=."
            ) from None
        return Task(id=f"webshop-{self._goals[index]}", question=self._shown.text, answers=())

    def search(self, keywords: str) -> str:
        """Search the shop; possible where the page has a search field.

        Args:
            keywords: What to look for.
        """
        if self._page.kind != "index":
            raise ToolError('There is no search field here. Click "Back to Search" first.')
        return self._go(_Page("results", query=" ".join(keywords.split())))

    def click(self, button: str) -> str:
        """Click something on the page.

        Args:
            button: What stands in brackets: a product's number, an option, a button.
        """
        button, page = button.strip().strip("[]"), self._page
        if button in self._shown.options and page.kind == "item":
            options = dict(page.options) | {self._shown.options[button]: button}
            return self._go(replace(page, options=tuple(options.items())))
        if button in self._shown.items and page.kind == "results":
            return self._go(replace(page, kind="item", item=button))
        if button not in self._shown.buttons or (following := _follow(page, button)) is None:
            known = sorted({*self._shown.buttons, *self._shown.items, *self._shown.options})
            raise ToolError(f"There is no {quoted(button)} here; there are: {', '.join(known)}.")
        return self._go(following)

    def is_finished(self) -> bool:
        return self._page.kind == "done"

    @property
    def score(self) -> float:
        """WebShop's reward; 0 until something has been bought."""
        return self._shown.score or 0.0

    def metrics(self) -> dict[str, float]:
        return {"success": float(self.score == 1.0), "score": self.score, **super().metrics()}

    def close(self) -> None:
        self._client.close()
        super().close()

    def _go(self, page: _Page) -> str:
        shown = self._fetch(page)
        self._page, self._shown = page, shown
        self.noted["score"] = self.score
        return shown.text

    def _fetch(self, page: _Page) -> _Shown:
        import httpx

        path = page.path(self._session)
        try:  # httpx limits the wait for each piece only
            answer = call_with_deadline(lambda: self._client.get(path), _SECONDS)
            return _read_page(answer.raise_for_status().text, page)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ToolError(f"the shop did not answer: {type(error).__name__}") from None


def _follow(page: _Page, button: str) -> _Page | None:
    """Return the page behind a button, or None."""
    if button == "Back to Search":
        return _Page()
    if page.kind == "results" and button in ("Next >", "< Prev"):
        return replace(page, number=max(1, page.number + (1 if button == "Next >" else -1)))
    if page.kind == "subpage" and button == "< Prev":
        return replace(page, kind="item", subpage="")
    if page.kind == "item":
        if button == "Buy Now":
            return replace(page, kind="done")
        if button == "< Prev":
            return replace(page, kind="results", item="", options=())
        if button in _SUBPAGES:
            return replace(page, kind="subpage", subpage=button)
    return None


def _read_page(html: str, page: _Page) -> _Shown:
    """Read a page: its text by line, with clickable elements in brackets."""
    import bs4

    shown, lines, kind_of_option = _Shown(""), [], ""
    chosen = {value for _, value in page.options}
    for node in bs4.BeautifulSoup(_closed(html), "html.parser").find_all(string=True):
        text, parent = " ".join(node.split()), node.parent
        if not text or isinstance(node, bs4.Comment) or parent is None or parent.name in _HIDDEN:
            continue
        line = f"[{text}]"
        if parent.name == "button":
            shown.buttons.add(text)
        elif parent.name == "label":
            shown.options[text] = kind_of_option
            line = f"[{line}]" if text in chosen else line
        elif "product-link" in (parent.get("class") or ()):
            shown.items.add(text)
        else:
            line = kind_of_option = text
        lines.append(line)
    shown.text = "\n".join(lines)
    if page.kind == "done":
        score = shown.text.partition(f"{_SCORE_TEXT}\n")[2].split("\n")[0]
        try:
            shown.score = min(1.0, max(0.0, float(score)))
        except ValueError:
            raise ToolError("the shop gave no score") from None
    return shown


def _closed(html: str) -> str:
    """Return a page without comments and unclosed tags.

    The parser's time is quadratic in unclosed tags.
    """
    first, *others = html[:_MAX_PAGE_CHARS].split("<!--")
    return _UNCLOSED.sub("&lt;", first + "".join(text.partition("-->")[2] for text in others))
