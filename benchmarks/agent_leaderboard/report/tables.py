"""The tables of a run in Markdown and in the terminal, and the files of a report."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import CONFIDENCE, Interval, p_value_text
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import (
    FAULT_RULE,
    RANK_RULE,
    Board,
    comparisons,
    shown_name,
    summarise,
)
from agent_leaderboard.report.visible_text import markdown_cell, visible

PAGE: Final = "leaderboard.html"
PAGE_WITH_TEXT: Final = "leaderboard_with_text.html"
PAGES: Final = (PAGE, PAGE_WITH_TEXT)
COMPARISON_RULE: Final = (
    "Difference of success in points, on the tasks that both ran; exact test (McNemar's for one "
    "episode per task, sign flips otherwise). Holm's correction is for the number of rows."
)
_MIN_WIDTH: Final = 120
"""Width in columns where the output is not a terminal."""

Cell = Mapping[str, Any]


def write_reports(run: Path, data: Path | None = None, *, text: bool = False) -> None:
    """Write ``leaderboard.md`` and ``.html`` into a run folder.

    The text of licensed data sets is left out, so that the page may be published; with `text`,
    ``leaderboard_with_text.html`` contains it. Episodes are replayed with the folder `data`.
    """
    from agent_leaderboard.report.web_page import make_page

    if text and data is None:
        raise ConfigurationError(
            "The text of licensed data sets is read from the data: give --data DIR with --text."
        )
    board = summarise(read_run(run))
    for name, make in REPORTS.items():
        write_text(run / name, make(board))
    write_text(run / PAGE, make_page(board, data, with_licensed_text=False))
    if text:
        write_text(run / PAGE_WITH_TEXT, make_page(board, data, with_licensed_text=True))


def percent(interval: Interval) -> str:
    """Format a share and its interval in per cent."""
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _rank(cell: Cell) -> str:
    return "" if cell["rank"] is None else f"{'=' * cell['is_tied']}{cell['rank']}"


def make_markdown(board: Board) -> str:
    """Return the leaderboard as Markdown, deterministically."""
    environment = jinja2.Environment(  # noqa: S701 - no HTML: cells are escaped for Markdown
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "cell": markdown_cell, "shown": shown_name, "score": _score, "json": json.dumps,
        "percent": lambda interval: percent(interval) if interval else "",
    }  # fmt: skip
    template = Path(__file__).with_name("leaderboard.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        board=board,
        manifest=board.run.manifest,
        rank_rule=RANK_RULE,
        fault_rule=FAULT_RULE,
        confidence=f"{CONFIDENCE:.0%}",
    )


def _score(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = percent(cell["success"])
    if rank := _rank(cell):
        text += f" · {rank}"
    if cell["num_faults"]:
        text += f" ({cell['num_faults']} failures)"
    return f"**{text}**" if cell["is_leading"] else text


REPORTS: Final[Mapping[str, Callable[[Board], str]]] = {
    "leaderboard.md": make_markdown,
}
"""Tables that depend on the results alone, by file name."""


# Terminal


def make_console() -> Console:
    """Return a console that is wide enough for tables if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_MIN_WIDTH)


def _table(names: Sequence[str], numbers: Sequence[str], title: str = "") -> Table:
    table = Table(title=Text(visible(title)), box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(run: Path) -> None:
    """Print the leaderboard of a run folder."""
    board, console = summarise(read_run(run)), make_console()
    numbers = ("rank", "success %", "return", "calls", "tokens", "s", "failures")
    table = _table(("environment", "agent"), numbers)
    for (environment, slug), cell in board.cells.items():
        table.add_row(
            f"{environment}{board.marks[environment]}",
            Text(visible(shown_name(board.run.manifest.agent(slug)))),
            _rank(cell),
            Text(percent(cell["success"])),
            f"{cell['return']:.2f}",
            f"{cell['calls']:.1f}",
            f"{cell['tokens']:,.0f}",
            "-" if cell["seconds"] is None else f"{cell['seconds']:.2f}",
            str(cell["num_faults"] or ""),
            style="bold" if cell["is_leading"] else "",
        )
    console.print(table)
    console.print(Text(RANK_RULE, style="dim"))


def print_comparison(run: Path, first: str, second: str) -> None:
    """Print a comparison of two agents on every environment that both ran."""
    board, console = summarise(read_run(run)), make_console()
    agents = board.run.manifest.agents
    slugs = {name: record.slug for record in agents for name in (record.slug, record.name)}
    one, other = (lookup(slugs, name, kind="agent of this run") for name in (first, second))
    interval = f"{CONFIDENCE:.0%} interval"
    numbers = ("difference", interval, "better", "equal", "worse", "p", "p by Holm")
    table = _table(["environment"], numbers, f"{first} - {second}")
    keys = [(slug, one, other) for slug in board.environments]
    for key, (found, p_holm) in comparisons(board, keys).items():
        difference = found.difference
        table.add_row(
            key[0],
            f"{100 * difference.mean:+.1f}",
            f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
            *map(str, (found.num_better, found.num_equal, found.num_worse)),
            *map(p_value_text, (found.p_value, p_holm)),
        )
    console.print(table)
    console.print(Text(COMPARISON_RULE, style="dim"))
