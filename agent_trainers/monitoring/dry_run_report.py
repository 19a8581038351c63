"""What ``--dry_run`` prints: groups, one trajectory step by step, rows, tables of facts."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.batch_record import BatchRecord
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.monitoring.trajectory_samples import TrajectorySample, state_change

MAX_GROUPS: Final = 10
MAX_ROWS: Final = 12
MAX_MESSAGE_CHARS: Final = 400
STRIP_WIDTH: Final = 72


def print_dry_run(
    console: Console,
    record: BatchRecord,
    sample: TrajectorySample,
    episodes: Sequence[EpisodeSummary],
    has_signal: Sequence[bool],
    tokenizer: Any,
) -> None:
    """Print groups, a trajectory of `record` step by step, and rows.

    `episodes` are those of all processes; `has_signal` says which have an advantage other than 0.
    """
    number = next(i for i, t in enumerate(record.trajectories) if t is sample.trajectory)
    console.print(_groups(episodes, has_signal))
    console.rule(f"trajectory {number + 1}, step by step", align="left")
    for t in range(len(sample.trajectory.transitions)):
        console.print(_step(sample, t, tokenizer))
    trajectory = sample.trajectory
    end = f"{trajectory.stop_reason.value}, return {trajectory.return_:.3f}"
    console.print(Text(f"ended: {end}{', success' if trajectory.success else ''}\n", "bold"))
    console.print(_rows(record, number))
    for i, row in enumerate(sample.rows, start=1):
        console.print(_mask(i, row))
    console.print("[dim]▒ prompt   ░ observation, masked   █ trained[/]\n")


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """Return names and values as a table."""
    names = Column(justify="right", style="dim", min_width=24)
    table = Table.grid(names, Column(), padding=(0, 2))
    table.title, table.title_justify = title, "left"
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _groups(episodes: Sequence[EpisodeSummary], has_signal: Sequence[bool]) -> Table:
    groups: dict[str, list[tuple[EpisodeSummary, bool]]] = {}
    for episode, signal in zip(episodes, has_signal, strict=True):
        groups.setdefault(episode.group_id, []).append((episode, signal))
    title = f"{len(groups)} groups, {len(episodes)} episodes"
    figures = [Column(name, justify="right") for name in ("success", "mean", "std", "turns")]
    group, task = Column("group", no_wrap=True), Column("task", overflow="fold")
    table = Table(group, task, *figures, "returns", title=title, title_justify="left")
    for number, members in enumerate(list(groups.values())[:MAX_GROUPS], start=1):
        scored = [episode for episode, _ in members if episode.is_scorable]
        returns = [sum(episode.rewards) for episode in scored]
        table.add_row(
            str(number),
            members[0][0].task_id,
            f"{sum(episode.success for episode in scored)}/{len(returns)}",
            f"{np.mean(returns):.2f}" if returns else "-",
            f"{np.std(returns):.2f}" if returns else "-",
            f"{np.mean([episode.num_steps for episode, _ in members]):.1f}",
            Text(" ").join(_member(*member) for member in members),
        )
    if len(groups) > MAX_GROUPS:
        table.caption = f"and {len(groups) - MAX_GROUPS} more groups"
    return table


def _member(episode: EpisodeSummary, has_signal: bool) -> Text:
    if not episode.is_scorable:
        return Text("failed", "red")
    style = ("green" if episode.success else "") if has_signal else "dim"
    return Text(f"{sum(episode.rewards):.2f}", style)


def _step(sample: TrajectorySample, t: int, tokenizer: Any) -> Group:
    """Return how the state of a step changed, its action, and what came of it."""
    transition = sample.trajectory.transitions[t]
    trained = sample.steps[t] if sample.steps is not None else None
    change = state_change(sample.trajectory, t)
    lines = []
    if trained is not None and trained.fork_reason:
        lines.append(Text(f"a new row begins here: {trained.fork_reason}", "blue"))
    for mark, style, messages in (("-", "red", change.dropped), ("+", "cyan", change.added)):
        for message in messages:
            content = _shortened(str(message.get("content", "")))
            lines.append(Text.assemble((f"{mark} {message['role']} ", style), content))
    action = Text()
    for j, token in enumerate(transition.completion_ids):
        style = "dim"
        if trained is not None and trained.is_trained[j]:
            advantage = trained.advantages[j]
            style = "green" if advantage > 1e-6 else "red" if advantage < -1e-6 else ""
        action.append(tokenizer.decode([token]), style).append(" ")
    terms = ", ".join(f"{name} {value:+.3f}" for name, value in transition.reward_terms.items())
    facts = [f"reward {transition.reward:+.3f} ({terms})"]
    if trained is not None and trained.advantages:
        facts.append(f"advantage {np.mean(trained.advantages):+.3f}")
    if trained is not None and trained.values:
        facts.append(f"value {trained.values[0]:+.3f}")
    if code := (transition.info.get("action") or {}).get("error"):
        facts.append(f"mistake {code}")
    head = f"step {t + 1}" if trained is None else f"step {t + 1}, row {trained.row + 1}"
    body = Group(*lines, action, Text(", ".join(facts), "dim"))
    return Group(Text(head, "bold"), Padding(body, (0, 0, 0, 2)))


def _rows(record: BatchRecord, first: int) -> Table:
    """Return some rows: those of the trajectory shown, then the others."""
    numbers = sorted(range(len(record.rows)), key=lambda i: record.rows[i].episode != first)
    all_advantages = record.tensors["advantages"].float().cpu().numpy()
    title = f"{len(record.rows)} rows of the main process"
    figures = [Column(name, justify="right") for name in ("prompt", "completion", "trained")]
    number, last = Column("trajectory", justify="right"), "advantage of each step"
    table = Table(number, "steps", *figures, last, title=title, title_justify="left")
    for i in numbers[:MAX_ROWS]:
        row = record.rows[i]
        row_steps, is_action = np.array(row.steps), np.array(row.is_action, bool)
        steps = np.unique(row_steps[is_action])
        own = all_advantages[i, : len(row_steps)]
        merged = f" to {steps[-1] + 1}, merged" if len(steps) > 1 else ""
        table.add_row(
            str(row.episode + 1),
            f"{steps[0] + 1}{merged}",
            str(len(row.prompt_ids)),
            str(len(row.completion_ids)),
            str(sum(row.is_trained)),
            " ".join(f"{own[is_action & (row_steps == step)].mean():+.2f}" for step in steps),
        )
    if len(record.rows) > MAX_ROWS:
        table.caption = f"and {len(record.rows) - MAX_ROWS} more rows"
    return table


def _mask(number: int, row: Row) -> Text:
    """Draw which tokens of a row are trained, one character for each, or for several."""
    kinds = ["▒"] * len(row.prompt_ids) + ["█" if trained else "░" for trained in row.is_trained]
    width = min(STRIP_WIDTH, len(kinds))
    strip = "".join(kinds[i * len(kinds) // width] for i in range(width))
    return Text.assemble((f"row {number} ", "dim"), strip)


def _shortened(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    return f"{text[:MAX_MESSAGE_CHARS]} … ({len(text) - MAX_MESSAGE_CHARS} more characters)"
