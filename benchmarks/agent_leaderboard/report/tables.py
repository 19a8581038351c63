"""The tables of a run: Markdown, CSV and the terminal; and the files of a report."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import CONFIDENCE, Interval, p_value_text
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import (
    FAULT_RULE,
    RANK_RULE,
    Board,
    comparisons,
    shown_name,
    summarise,
)
from agent_leaderboard.report.visible_text import csv_cell, markdown_cell, markdown_table, visible

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
    """Write ``leaderboard.md``, ``.csv`` and ``.html`` into a run folder.

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


# Markdown


def make_markdown(board: Board) -> str:
    """Return the leaderboard as Markdown, deterministically."""
    manifest = board.run.manifest
    protocol = manifest.protocol
    environments = (
        f"- `{record.slug}`: {record.id}, {_arguments(record)}{record.num_tasks} tasks"
        f"{board.marks[record.slug]}. Contamination: {markdown_cell(record.contamination)}"
        for record in manifest.environments
    )
    parts = [
        "# Leaderboard",
        f"Success in %, with the exact {CONFIDENCE:.0%} interval over tasks and the rank; "
        f"{protocol.samples_per_task} episode(s) per task, temperature {protocol.temperature:g}, "
        f"seed {protocol.seed}. {RANK_RULE} An oracle knows the answers: it is an upper bound and "
        f"has no rank. {FAULT_RULE}",
        _matrix(board),
        "## Costs",
        "Means over episodes. Seconds depend on the machine: see `leaderboard.html`.",
        _costs(board),
        *_models(manifest.agents),
        "## Environments",
        "\n".join(environments),
    ]
    if manifest.left_out:
        lines = (f"- {markdown_cell(o.id)}: {markdown_cell(o.reason)}" for o in manifest.left_out)
        parts += ["Left out:", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _arguments(record: EnvironmentRecord) -> str:
    given = (f"{key}={json.dumps(value)}" for key, value in record.kwargs.items())
    return "".join(f"{markdown_cell(text)}, " for text in given)


def _matrix(board: Board) -> str:
    rows = []
    for environment in board.environments:
        cells = [board.cells.get((environment, agent)) for agent in board.agents]
        rows.append([f"`{environment}`{board.marks[environment]}", *map(_matrix_cell, cells)])
    means = {"**mean**": board.overall, "mean of others like these": board.elsewhere}
    for name, by_agent in means.items():
        own = [by_agent[agent] for agent in board.agents]
        rows.append([name, *(percent(one) if one else "" for one in own)])
    names = [markdown_cell(shown_name(record)) for record in board.run.manifest.agents]
    return markdown_table(["environment", *names], rows)


def _matrix_cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = percent(cell["success"])
    if rank := _rank(cell):
        text += f" · {rank}"
    if cell["num_faults"]:
        text += f" ({cell['num_faults']} failures)"
    return f"**{text}**" if cell["is_leading"] else text


def _costs(board: Board) -> str:
    headings = ["environment", "agent", "return", "turns", "calls", "tokens read",
                "tokens written", "money", "failures"]  # fmt: skip
    rows = []
    for (environment, slug), cell in board.cells.items():
        agent = board.run.manifest.agent(slug)
        currency = markdown_cell(agent.prices.currency) if agent.prices else ""
        rows.append([
            f"`{environment}`",
            markdown_cell(shown_name(agent)),
            f"{cell['return']:.3f}",
            f"{cell['turns']:.1f}",
            f"{cell['calls']:.1f}",
            f"{cell['prompt_tokens']:,.0f}",
            f"{cell['completion_tokens']:,.0f}",
            "" if cell["money"] is None else f"{cell['money']:.6f} {currency}",
            str(cell["num_faults"]),
        ])  # fmt: skip
    return markdown_table(headings, rows, names=2)


def _models(agents: Sequence[AgentRecord]) -> list[str]:
    """Return a table of the models and how they are made, if any."""
    rows = []
    for agent in agents:
        if agent.model is not None:
            options = " ".join(f"--{name} {value}" for name, value in (agent.train or {}).items())
            origin = agent.made_by or (f"agent-r1-train {options}" if agent.train else "")
            names = [markdown_cell(text) for text in (shown_name(agent), agent.model, origin)]
            rows.append([names[0], agent.kind, *names[1:]])
    if not rows:
        return []
    return ["## Models", markdown_table(["agent", "kind", "model", "made by"], rows, names=4)]


# CSV


def make_csv(board: Board) -> str:
    """Return one row of CSV per cell, deterministically."""
    rows = [_csv_row(board, *key, cell) for key, cell in board.cells.items()]
    table: str = pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
    return table


def _csv_row(board: Board, environment: str, slug: str, cell: Cell) -> dict[str, Any]:
    record, agent = board.run.manifest.environment(environment), board.run.manifest.agent(slug)
    success, largest = cell["success"], max(cell["pass_at"])
    return {
        "environment": environment,
        "environment_id": csv_cell(record.id),
        "measure": board.marks[environment].strip(" ()") or "published",
        "agent": csv_cell(agent.name),
        "kind": csv_cell(agent.kind),
        "model": csv_cell(agent.model or ""),
        **{name: cell[name] for name in ("rank", "is_tied", "num_episodes", "num_faults")},
        "success": success.mean,
        "success_low": success.low,
        "success_high": success.high,
        "return": cell["return"],
        "num_tasks": success.count,
        "k": largest,
        "pass_at_k": cell["pass_at"][largest],
        "pass_hat_k": cell["pass_hat"][largest],
        "turns": cell["turns"],
        **{name: cell[name] for name in ("calls", "prompt_tokens", "completion_tokens", "money")},
    }


REPORTS: Final[Mapping[str, Callable[[Board], str]]] = {
    "leaderboard.md": make_markdown,
    "leaderboard.csv": make_csv,
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
