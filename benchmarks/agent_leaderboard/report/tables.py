"""The files of a report: Markdown and CSV tables, and the web pages."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import CONFIDENCE, Interval
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import (
    FAULT_RULE,
    RANK_RULE,
    Board,
    CellStats,
    shown_name,
    summarise,
    trained_agents,
)
from agent_leaderboard.report.visible_text import csv_cell, markdown_cell, markdown_table

PAGE: Final = "leaderboard.html"
PAGE_WITH_TEXT: Final = "leaderboard_with_text.html"
PAGES: Final = (PAGE, PAGE_WITH_TEXT)


def write_reports(run: Path, data: Path | None = None, *, text: bool = False) -> None:
    """Write ``leaderboard.md``, ``.csv`` and ``.html`` into a run folder.

    The text of licensed data sets is left out, so that the page may be published; with `text`,
    ``leaderboard_with_text.html`` contains it. Episodes are replayed with the folder `data`.

    Raises:
        ConfigurationError: If `text` is given without `data`.
        DataError: If the run folder cannot be read.
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


def rank_mark(cell: CellStats) -> str:
    """Format a rank; ``=`` marks a shared one."""
    return "" if cell.rank is None else f"{'=' * cell.is_tied}{cell.rank}"


def ranked(board: Board, environment: str) -> list[CellStats]:
    """Return the cells of an environment, best first."""
    cells = [cell for (slug, _), cell in board.cells.items() if slug == environment]
    return sorted(
        cells,
        key=lambda cell: (
            math.inf if cell.rank is None else cell.rank,
            0.0 if cell.success is None else -cell.success.mean,
            cell.agent,
        ),
    )


def percent(interval: Interval) -> str:
    """Format a share and its interval in per cent."""
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


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
        *_seeds(board),
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


def _seeds(board: Board) -> list[str]:
    """Return a table of the agents that were trained with several seeds, if any."""
    trained = trained_agents(board)
    if not trained:
        return []
    rows = [
        [f"`{environment}`", *(percent(own[environment]) if environment in own else "-"
                               for own in trained.values())]
        for environment in board.environments
    ]  # fmt: skip
    fewest = min(map(len, trained))
    return [
        "## Over seeds of training",
        f"Mean success of trainings that differ in their seed, with the {CONFIDENCE:.0%} interval "
        f"of Student's t over them. The sign test of {fewest} seeds against as many of another "
        f"agent cannot have a p-value below {2 * 0.5**fewest:.2g}.",
        markdown_table(["environment", *(markdown_cell(", ".join(one)) for one in trained)], rows),
    ]


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


def _matrix_cell(cell: CellStats | None) -> str:
    if cell is None or cell.success is None:
        return "-"
    text = percent(cell.success)
    if cell.rank is not None:
        text += f" · {rank_mark(cell)}"
    if cell.num_faults:
        text += f" ({cell.num_faults} failures)"
    return f"**{text}**" if cell.is_leading else text


def _costs(board: Board) -> str:
    headings = ["environment", "agent", "return", "turns", "calls", "tokens read",
                "tokens written", "money", "failures"]  # fmt: skip
    rows = []
    for environment, cell in _ordered(board):
        cost = cell.cost
        record = board.run.manifest.agent(cell.agent)
        currency = record.prices.currency if record.prices else ""
        money = cost["money"]
        rows.append([
            f"`{environment}`",
            markdown_cell(shown_name(record)),
            "" if cell.return_ is None else f"{cell.return_:.3f}",
            f"{cell.num_steps:.1f}",
            f"{cost['calls']:.1f}",
            f"{cost['prompt_tokens']:,.0f}",
            f"{cost['completion_tokens']:,.0f}",
            "" if money is None else f"{money:.6f} {markdown_cell(currency)}",
            str(cell.num_faults),
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


def make_csv(board: Board) -> str:
    """Return one row of CSV per cell, deterministically."""
    rows = [_csv_row(board, environment, cell) for environment, cell in _ordered(board)]
    table: str = pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
    return table


def _csv_row(board: Board, environment: str, cell: CellStats) -> dict[str, Any]:
    record = board.run.manifest.environment(environment)
    agent = board.run.manifest.agent(cell.agent)
    success, largest = cell.success, max(cell.pass_at, default=None)
    costs = ("calls", "prompt_tokens", "completion_tokens", "money")
    return {
        "environment": environment,
        "environment_id": csv_cell(record.id),
        "measure": board.marks[environment].strip(" ()") or "published",
        "agent": csv_cell(agent.name),
        "kind": csv_cell(agent.kind),
        "model": csv_cell(agent.model or ""),
        "rank": cell.rank,
        "is_tied": cell.is_tied,
        "num_episodes": cell.num_episodes,
        "num_faults": cell.num_faults,
        "success": success and success.mean,
        "success_low": success and success.low,
        "success_high": success and success.high,
        "return": cell.return_,
        "num_tasks": success and success.count,
        "k": largest,
        "pass_at_k": None if largest is None else cell.pass_at[largest],
        "pass_hat_k": None if largest is None else cell.pass_hat[largest],
        "turns": cell.num_steps,
        **{name: cell.cost[name] for name in costs},
    }


def _ordered(board: Board) -> Iterator[tuple[str, CellStats]]:
    for environment in board.environments:
        for cell in ranked(board, environment):
            yield environment, cell


REPORTS: Final[Mapping[str, Callable[[Board], str]]] = {
    "leaderboard.md": make_markdown,
    "leaderboard.csv": make_csv,
}
"""Tables that depend on the results alone, by file name."""
