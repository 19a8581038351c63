"""The leaderboard of a run in the terminal: its tables, and two agents side by side."""

from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_envs.core.lookup import lookup
from agent_envs.scoring.statistics import ALPHA, CONFIDENCE, Interval, holm, p_value_text
from agent_leaderboard.report.summary import (
    Board,
    read_run,
    shown_name,
    summarise,
)
from agent_leaderboard.report.tables import percent, rank_mark, ranked
from agent_leaderboard.report.uncertainty import RANK_RULE
from agent_leaderboard.report.visible_text import visible

COMPARISON_RULE: Final = (
    "Difference of success in points, on the tasks that both played; the test is exact (McNemar's "
    "where a task is played once, of random signs else). Holm corrects its p-values for the number "
    "of rows."
)
_BAR_WIDTH: Final = 20
_MAX_NAME_WIDTH: Final = 26
_MIN_WIDTH: Final = 120
"""Columns of the widest table: where a pipe or a file says nothing of its width, it is used."""


def print_table(run: Path, console: Console | None = None) -> None:
    """Print the leaderboard of a run folder, to standard output if no console is given."""
    console = console or make_console()
    board = summarise(read_run(run))
    for environment in board.environments:
        console.print(_environment_table(board, environment))
        console.print()
    console.print(Text(RANK_RULE, style="dim"))


def print_comparison(run: Path, first: str, second: str, console: Console | None = None) -> None:
    """Print how two agents compare on every environment that both played.

    Raises:
        UnknownNameError: If the run has no agent of such a name.
    """
    console = console or make_console()
    board = summarise(read_run(run))
    agents = board.run.manifest.agents
    slugs = {name: record.slug for record in agents for name in (record.slug, record.name)}
    one, other = (lookup(slugs, name, kind="agent of this run") for name in (first, second))
    table = Table(title=Text(f"{visible(first)} less {visible(second)}"), box=box.SIMPLE_HEAD)
    table.add_column("environment")
    for heading in ("difference", f"{CONFIDENCE:.0%} interval", "better", "equal", "worse",
                    "p", "p by Holm"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    found = {
        environment: comparison
        for environment in board.environments
        if (comparison := board.compare(environment, one, other))
    }
    adjusted = holm([comparison.p_value for comparison in found.values()])
    for (environment, comparison), p_holm in zip(found.items(), adjusted, strict=True):
        difference = comparison.difference
        counts = (comparison.num_better, comparison.num_equal, comparison.num_worse)
        table.add_row(
            Text(environment),
            Text(f"{100 * difference.mean:+.1f}", style="bold" if p_holm < ALPHA else ""),
            f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
            *map(str, counts),
            p_value_text(comparison.p_value),
            p_value_text(p_holm),
        )
    console.print(table)
    console.print(Text(COMPARISON_RULE, style="dim"))


def _environment_table(board: Board, environment: str) -> Table:
    record = board.run.manifest.environment(environment)
    title = Text(
        f"{environment}{board.marks[environment]} · {visible(record.id)} · {record.num_tasks} tasks"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("agent", max_width=_MAX_NAME_WIDTH, overflow="fold")
    table.add_column("success %", justify="right", no_wrap=True)
    table.add_column("0" + "100".rjust(_BAR_WIDTH - 1), no_wrap=True)
    for heading in ("return", "calls", "tokens", "s", "faults"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in ranked(board, environment):
        cost = cell.cost
        table.add_row(
            rank_mark(cell),
            Text(visible(shown_name(board.run.manifest.agent(cell.agent)))),
            Text("-" if cell.success is None else percent(cell.success)),
            Text("" if cell.success is None else draw_interval(cell.success), style="cyan"),
            "-" if cell.return_ is None else f"{cell.return_:.2f}",
            f"{cost.calls:.1f}",
            f"{cost.tokens:,.0f}",
            "-" if cost.seconds is None else f"{cost.seconds:.2f}",
            str(cell.num_faults) if cell.num_faults else "",
            style="bold" if cell.is_leading else "",
        )
    return table


def draw_interval(interval: Interval) -> str:
    """Draw a share and its interval on a line from 0 to 1."""
    low, mean, high = (
        round(value * (_BAR_WIDTH - 1)) for value in (interval.low, interval.mean, interval.high)
    )
    return "".join(
        "●" if i == mean else "━" if low <= i <= high else "·" for i in range(_BAR_WIDTH)
    )


def make_console() -> Console:
    """Return a console that is wide enough for tables where nothing says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=_MIN_WIDTH)
