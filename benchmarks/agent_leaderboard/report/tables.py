"""The files of a report: a table in Markdown, and a web page."""

import json
from pathlib import Path
from typing import Any, Final

import jinja2

from agent_envs.data.files import write_text
from agent_envs.scoring.statistics import CONFIDENCE, Interval, p_value_text
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import (
    FAULT_RULE,
    RANK_RULE,
    Board,
    on_trust,
    shown_name,
    summarise,
)
from agent_leaderboard.report.visible_text import markdown_cell, visible

REPORT: Final = "leaderboard.md"
"""Depends on the results alone, so that `verify` can compare it."""
PAGE: Final = "leaderboard.html"


def write_reports(run: Path, data: Path | None = None) -> str:
    """Write table and page into a run's folder; return the table of scores."""
    from agent_leaderboard.report.web_page import make_page

    board = summarise(read_run(run))
    text = make_markdown(board)
    write_text(run / REPORT, text)
    write_text(run / PAGE, make_page(board, data))
    return text.partition("\n## ")[0]


def make_markdown(board: Board) -> str:
    """Return the leaderboard as Markdown, deterministically."""
    return render("leaderboard.md.jinja", board, autoescape=False)


def render(template: str, board: Board, *, autoescape: bool, **values: Any) -> str:
    """Fill in a template of this folder; `autoescape` is for HTML."""
    environment = jinja2.Environment(
        autoescape=autoescape,  # noqa: S701 - Markdown is escaped by the filter `cell`
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "cell": markdown_cell, "shown": shown_name, "score": _score, "json": json.dumps,
        "percent": lambda interval: _percent(interval) if interval else "", "visible": visible,
        "p_value": p_value_text, "pairs": lambda d: ", ".join(f"{k}={v}" for k, v in d.items()),
    }  # fmt: skip
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(
        board=board,
        manifest=board.run.manifest,
        rank_rule=RANK_RULE,
        fault_rule=FAULT_RULE,
        on_trust=on_trust,
        is_hidden=board.run.manifest.protocol.is_hidden,
        confidence=f"{CONFIDENCE:.0%}",
        **values,
    )


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _score(cell: Any) -> str:
    """Format success, interval, rank and failures of an agent in an environment."""
    if cell is None:
        return "-"
    text = _percent(cell["success"])
    if cell["rank"] is not None:
        text += f" · {'=' * cell['is_tied']}{cell['rank']}"
    if cell["num_faults"]:
        text += f" ({cell['num_faults']} failures)"
    return f"**{text}**" if cell["is_leading"] else text
