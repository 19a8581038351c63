"""The leaderboard in the terminal: tables, and comparisons of agents and of runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_envs.core.lookup import lookup
from agent_envs.errors import DataError
from agent_envs.scoring.statistics import (
    ALPHA,
    CONFIDENCE,
    Comparison,
    Interval,
    compare,
    holm,
    p_value_text,
)
from agent_leaderboard.records.manifest import AgentRecord
from agent_leaderboard.records.results import Cell, read_run
from agent_leaderboard.report.board import RANK_RULE, Board, shown_name, summarise
from agent_leaderboard.report.tables import percent, rank_mark, ranked
from agent_leaderboard.report.visible_text import visible

COMPARISON_RULE: Final = (
    "Difference of success in points, on the tasks that both ran; exact test (McNemar's for one "
    "episode per task, sign flips otherwise). Holm's correction is for the number of rows."
)
HISTORY_RULE: Final = (
    "Difference of success in points, on the tasks with the same content in both runs; p-values of "
    "the exact paired test over tasks, not corrected for the number of rows."
)
_AGENT_FIELDS: Final = ("kind", "model", "weights_sha256", "tool_format", "settings", "train")
_BAR_WIDTH: Final = 20
_MAX_NAME_WIDTH: Final = 26
_MIN_WIDTH: Final = 120
"""Width in columns where the output is not a terminal."""


def make_console() -> Console:
    """Return a console that is wide enough for tables if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_MIN_WIDTH)


def print_table(run: Path, console: Console | None = None) -> None:
    """Print the leaderboard of a run folder."""
    console = console or make_console()
    board = summarise(read_run(run))
    for environment in board.environments:
        console.print(_environment_table(board, environment))
        console.print()
    console.print(Text(RANK_RULE, style="dim"))


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
    _add_numbers(table, "return", "calls", "tokens", "s", "failures")
    for cell in ranked(board, environment):
        cost, success = cell.cost, cell.success
        table.add_row(
            rank_mark(cell),
            Text(visible(shown_name(board.run.manifest.agent(cell.agent)))),
            Text("-" if success is None else percent(success)),
            Text("" if success is None else draw_interval(success), style="cyan"),
            "-" if cell.return_ is None else f"{cell.return_:.2f}",
            f"{cost['calls']:.1f}",
            f"{cost['tokens']:,.0f}",
            "-" if cost["seconds"] is None else f"{cost['seconds']:.2f}",
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


def _add_numbers(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def print_comparison(run: Path, first: str, second: str, console: Console | None = None) -> None:
    """Print a comparison of two agents on every environment that both ran.

    Raises:
        UnknownNameError: If the run has no agent of such a name.
    """
    console = console or make_console()
    board = summarise(read_run(run))
    agents = board.run.manifest.agents
    slugs = {name: record.slug for record in agents for name in (record.slug, record.name)}
    one, other = (lookup(slugs, name, kind="agent of this run") for name in (first, second))
    table = Table(title=Text(f"{visible(first)} - {visible(second)}"), box=box.SIMPLE_HEAD)
    table.add_column("environment")
    interval = f"{CONFIDENCE:.0%} interval"
    _add_numbers(table, "difference", interval, "better", "equal", "worse", "p", "p by Holm")
    found = {
        environment: comparison
        for environment in board.environments
        if (comparison := board.compare(environment, one, other))
    }
    adjusted = holm([comparison.p_value for comparison in found.values()])
    for (environment, comparison), p_holm in zip(found.items(), adjusted, strict=True):
        counts = (comparison.num_better, comparison.num_equal, comparison.num_worse)
        table.add_row(
            Text(environment),
            *_difference(comparison, is_bold=p_holm < ALPHA),
            *map(str, counts),
            p_value_text(comparison.p_value),
            p_value_text(p_holm),
        )
    console.print(table)
    console.print(Text(COMPARISON_RULE, style="dim"))


def _difference(comparison: Comparison, *, is_bold: bool) -> tuple[Text, str]:
    difference = comparison.difference
    return (
        Text(f"{100 * difference.mean:+.1f}", style="bold" if is_bold else ""),
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
    )


def print_history(paths: Sequence[Path], console: Console | None = None) -> None:
    """Print the change of every score between each two consecutive runs.

    Raises:
        DataError: If there are fewer than two runs, or they have no common task.
    """
    if len(paths) < 2:
        raise DataError("history: give two run folders or more, the oldest first.")
    console = console or make_console()
    boards = [summarise(read_run(path)) for path in paths]
    for i in range(1, len(paths)):
        old, new = boards[i - 1 : i + 1]
        names = f"{paths[i - 1]} → {paths[i]}"
        table = Table(title=Text(visible(names)), box=box.SIMPLE_HEAD)
        table.add_column("environment")
        table.add_column("agent", overflow="fold")
        _add_numbers(table, "tasks", "old %", "new %", "change", f"{CONFIDENCE:.0%} interval", "p")
        for cell in new.cells:
            before, after = _by_content(old, cell), _by_content(new, cell)
            shared = sorted(before.keys() & after.keys())
            pair = [{j: one[key] for j, key in enumerate(shared)} for one in (before, after)]
            if (comparison := compare(pair[1], pair[0])) is None:
                continue
            difference = comparison.difference
            is_certain = difference.low > 0 or difference.high < 0
            table.add_row(
                cell[0],
                Text(visible(shown_name(new.run.manifest.agent(cell[1])))),
                str(difference.count),
                *(f"{100 * sum(one.values()) / len(one):.1f}" for one in pair),
                *_difference(comparison, is_bold=is_certain),
                f"{comparison.p_value:.3f}",
            )
        if not table.rows:
            raise DataError(f"{names}: no common task of any agent.")
        console.print(table)
        for text in _changes(old, new):
            console.print(Text(visible(text), style="dim"))
    console.print(Text(HISTORY_RULE, style="dim"))


def _by_content(board: Board, cell: Cell) -> dict[str, float]:
    """Return the score of each task by the hash of its content."""
    if cell not in board.cells:
        return {}
    hashes = {entry.task: entry.sha256 for entry in board.run.tasks[cell[0]]}
    return {hashes[task]: share for task, share in board.cells[cell].scores.items()}


def _changes(old: Board, new: Board) -> Iterator[str]:
    """Yield differences between two runs: protocol, agents, versions."""
    first, second = old.run.manifest, new.run.manifest
    if first.protocol != second.protocol:
        yield f"protocol: {first.protocol} → {second.protocol}"
    before = {agent.slug: agent for agent in first.agents}
    for agent in second.agents:
        known = before.pop(agent.slug, None)
        changes = ["is new"] if known is None else list(_agent_changes(known, agent))
        yield from (f"agent {agent.slug}: {text}" for text in changes)
    yield from (f"agent {slug}: was removed" for slug in before)


def _agent_changes(old: AgentRecord, new: AgentRecord) -> Iterator[str]:
    for name in _AGENT_FIELDS:
        one, other = getattr(old, name), getattr(new, name)
        if one != other:
            yield f"{name}: {one} → {other}"
    for name in sorted(old.packages.keys() | new.packages.keys()):
        versions = [packages.get(name) or "not used" for packages in (old.packages, new.packages)]
        if versions[0] != versions[1]:
            yield f"{name} {versions[0]} → {versions[1]}"
