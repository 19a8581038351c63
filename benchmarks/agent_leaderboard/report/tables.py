"""The leaderboard of a run as files that people read: Markdown, CSV and a web page."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import CONFIDENCE, Interval
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.report.seeds import Trained, trained_agents
from agent_leaderboard.report.summary import (
    Board,
    Cell,
    is_verifiable,
    read_run,
    shown_name,
    summarise,
)
from agent_leaderboard.report.uncertainty import FAULT_RULE, RANK_RULE
from agent_leaderboard.report.visible_text import csv_cell, markdown_cell, markdown_table
from agent_leaderboard.report.web_page import make_page

MAX_EPISODES: Final = 20
TABLE: Final = "leaderboard.md"
CSV: Final = "leaderboard.csv"
PAGE: Final = "leaderboard.html"
REPORTS: Final = (TABLE, CSV, PAGE)
PAGE_WITH_TEXT: Final = "leaderboard_with_text.html"


def write_reports(run: Path, data: Path | None = None, *, text: bool = False) -> None:
    """Write ``leaderboard.md``, ``.csv`` and ``.html`` into a run folder.

    The text of licensed data sets is left out, so that the page may be published; where `text` is
    asked for, one more page for one's own eyes holds it, ``leaderboard_with_text.html``. A page
    shows at most `MAX_EPISODES` of a cell, played again with the data sets of the folder `data`.

    Raises:
        ConfigurationError: If `text` is asked for without `data`.
        DataError: If the run folder cannot be read.
    """
    if text and data is None:
        raise ConfigurationError(
            "The text of licensed data sets is read from the data: give --data DIR with --text."
        )
    names = (*REPORTS, PAGE_WITH_TEXT) if text else REPORTS
    for name, content in make_reports(summarise(read_run(run)), names, data).items():
        write_text(run / name, content)


def make_reports(board: Board, names: Sequence[str], data: Path | None = None) -> dict[str, str]:
    """Return the content of reports by name; see `write_reports`."""
    made = {TABLE: make_markdown, CSV: make_csv}
    return {
        name: made[name](board)
        if name in made
        else make_page(
            board,
            title=name,
            data=data,
            with_licensed_text=name == PAGE_WITH_TEXT,
            max_episodes=MAX_EPISODES,
        )
        for name in names
    }


def rank_mark(cell: Cell) -> str:
    """Write a rank; ``=`` says that it is shared; an upper bound has none."""
    return "" if cell.rank is None else f"{'=' * cell.is_tied}{cell.rank}"


def ranked(board: Board, environment: str) -> list[Cell]:
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


# Markdown and CSV


def make_markdown(board: Board) -> str:
    """Return the leaderboard as Markdown; the same for the same results, in any process."""
    manifest = board.run.manifest
    protocol = manifest.protocol
    parts = [
        "# Leaderboard",
        f"Success in %, with the exact {CONFIDENCE:.0%} interval over tasks and the "
        f"rank; {protocol.samples_per_task} episode(s) a task, temperature "
        f"{protocol.temperature:g}, seed {protocol.seed}. {RANK_RULE} An oracle knows the "
        f"answers: it is an upper bound and has no rank. {FAULT_RULE}",
        _matrix(board),
        *_seeds(board),
        "## Costs",
        "Means over episodes. Seconds depend on the machine: they are in `leaderboard.html`.",
        _costs(board),
        *_models(manifest.agents),
        "## Environments",
        "\n".join(
            f"- `{record.slug}`: {record.id}, {_arguments(record)}{record.num_tasks} tasks"
            f"{board.marks[record.slug]}. Contamination: {markdown_cell(record.contamination)}"
            for record in manifest.environments
        ),
    ]
    if manifest.left_out:
        lines = (f"- {markdown_cell(o.id)}: {markdown_cell(o.reason)}" for o in manifest.left_out)
        parts += ["Left out:", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def make_csv(board: Board) -> str:
    """Return every cell as a row of CSV; the same for the same results, in any process."""
    rows = [_csv_row(board, environment, cell) for environment, cell in _ordered(board)]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["environment"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _seeds(board: Board) -> list[str]:
    """Return a table of the agents that were trained several times, where there are any."""
    trained = trained_agents(board)
    if not trained:
        return []
    rows = [
        [f"`{environment}`", *(_over_seeds(one, environment) for one in trained)]
        for environment in board.environments
    ]
    names = [markdown_cell(", ".join(one.agents)) for one in trained]
    fewest = min(len(one.agents) for one in trained)
    return [
        "## Over seeds of training",
        f"Mean success of trainings that differ in their seed, with the {CONFIDENCE:.0%} interval "
        "of Student's t over them. Whatever the scores, the sign test of "
        f"{fewest} seeds against as many of another agent reaches no p below "
        f"{2 * 0.5**fewest:.2g}.",
        markdown_table(["environment", *names], rows),
    ]


def _over_seeds(trained: Trained, environment: str) -> str:
    interval = trained.success.get(environment)
    return "-" if interval is None else percent(interval)


def _arguments(record: EnvironmentRecord) -> str:
    given = (f"{key}={json.dumps(value)}" for key, value in record.kwargs.items())
    return "".join(f"{markdown_cell(text)}, " for text in given)


def _matrix(board: Board) -> str:
    rows = []
    for environment in board.environments:
        cells = [board.cells.get((environment, agent)) for agent in board.agents]
        rows.append([f"`{environment}`{board.marks[environment]}", *map(_matrix_cell, cells)])
    overall = [board.overall[agent] for agent in board.agents]
    rows.append(["**mean**", *(percent(one) if one else "" for one in overall)])
    elsewhere = [board.elsewhere[agent] for agent in board.agents]
    rows.append(["mean of others like these", *(percent(one) if one else "" for one in elsewhere)])
    names = [markdown_cell(shown_name(record)) for record in board.run.manifest.agents]
    return markdown_table(["environment", *names], rows)


def _matrix_cell(cell: Cell | None) -> str:
    if cell is None or cell.success is None:
        return "-" if cell is None else f"{cell.num_faults} faults"
    text = percent(cell.success)
    if cell.rank is not None:
        text += f" · {rank_mark(cell)}"
    if cell.num_faults:
        text += f" ({cell.num_faults} faults)"
    return f"**{text}**" if cell.is_leading else text


def _costs(board: Board) -> str:
    headings = ["environment", "agent", "return", "turns", "calls", "tokens read",
                "tokens written", "money", "faults"]  # fmt: skip
    rows = []
    for environment, cell in _ordered(board):
        cost = cell.cost
        record = board.run.manifest.agent(cell.agent)
        currency = record.prices.currency if record.prices else ""
        values = [
            f"`{environment}`",
            markdown_cell(shown_name(record)),
            "" if cell.return_ is None else f"{cell.return_:.3f}",
            f"{cell.num_steps:.1f}",
            f"{cost.calls:.1f}",
            f"{cost.prompt_tokens:,.0f}",
            f"{cost.completion_tokens:,.0f}",
            "" if cost.money is None else f"{cost.money:.6f} {markdown_cell(currency)}",
            str(cell.num_faults),
        ]
        rows.append(values)
    return markdown_table(headings, rows, names=2)


def _models(agents: Sequence[AgentRecord]) -> list[str]:
    """Return a table of the models, where there are any, and of how they are made."""
    rows = [
        [markdown_cell(shown_name(agent)), agent.kind, markdown_cell(agent.model), _origin(agent)]
        for agent in agents
        if agent.model is not None
    ]
    if not rows:
        return []
    return ["## Models", markdown_table(["agent", "kind", "model", "made by"], rows, names=4)]


def _origin(agent: AgentRecord) -> str:
    trained = " ".join(f"--{name} {value}" for name, value in (agent.train or {}).items())
    command = agent.made_by or (f"agent-r1-train {trained}" if agent.train else "")
    return markdown_cell(command)


def percent(interval: Interval) -> str:
    """Write a share and its interval in per cent."""
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _csv_row(board: Board, environment: str, cell: Cell) -> dict[str, Any]:
    record = board.run.manifest.environment(environment)
    agent = board.run.manifest.agent(cell.agent)
    row: dict[str, Any] = {
        "environment": environment,
        "environment_id": csv_cell(record.id),
        "is_verifiable": is_verifiable(record),
        "measure": board.marks[environment].strip(" ()") or "published",
        "agent": csv_cell(agent.name),
        "kind": csv_cell(agent.kind),
        "model": csv_cell(agent.model or ""),
        "rank": cell.rank,
        "is_tied": cell.is_tied,
        "num_episodes": cell.num_episodes,
        "num_faults": cell.num_faults,
    }
    success = cell.success
    row["success"] = success and success.mean
    row["success_low"] = success and success.low
    row["success_high"] = success and success.high
    row["return"] = cell.return_
    largest = max(cell.pass_at, default=None)
    costs = ("calls", "prompt_tokens", "completion_tokens", "money")
    return row | {
        "num_tasks": cell.success and cell.success.count,
        "k": largest,
        "pass_at_k": None if largest is None else cell.pass_at[largest],
        "pass_hat_k": None if largest is None else cell.pass_hat[largest],
        "turns": cell.num_steps,
        **{name: getattr(cell.cost, name) for name in costs},
    }


def _ordered(board: Board) -> Iterator[tuple[str, Cell]]:
    for environment in board.environments:
        for cell in ranked(board, environment):
            yield environment, cell
