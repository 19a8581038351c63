"""What ``--dry_run`` prints: groups, one trajectory step by step, rows, tables of facts."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.batch_record import BatchRecord
from agent_trainers.monitoring.trajectory_samples import TrajectorySample, state_change

MAX_GROUPS: Final = 10
MAX_ROWS: Final = 12
MAX_MESSAGE_CHARS: Final = 400
STRIP_WIDTH: Final = 72


class EpisodeLine(NamedTuple):
    """An episode of the batch in a few numbers."""

    group_id: str
    task_id: str
    return_: float | None
    """Sum of its rewards; None if it cannot be scored."""
    success: bool
    """Whether it counts as one: never, if it cannot be scored."""
    num_steps: int
    has_signal: bool
    """Whether any of its advantages is not 0."""


def print_dry_run(
    console: Console,
    record: BatchRecord,
    sample: TrajectorySample,
    episodes: Sequence[EpisodeLine],
    tokenizer: Any,
) -> None:
    """Print groups, a trajectory step by step, and rows.

    Args:
        console: Where.
        record: The batch of the main process.
        sample: One of its trajectories.
        episodes: Those of all processes.
        tokenizer: Turns token ids back into text.
    """
    number = next(i for i, t in enumerate(record.trajectories) if t is sample.trajectory)
    console.print(_groups(episodes))
    console.rule(f"trajectory {number + 1}, step by step", align="left")
    _print_trajectory(sample, console, tokenizer)
    console.print(_rows(record, number))
    for i, row in enumerate(sample.rows, start=1):
        console.print(_mask(i, row))
    console.print("[dim]▒ prompt   ░ observation, masked   █ trained[/]\n")


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """Return names and values as a table."""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = title, "left"
    table.add_column(justify="right", style="dim", min_width=24)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _groups(episodes: Sequence[EpisodeLine]) -> Table:
    groups: dict[str, list[EpisodeLine]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    table = Table(title=f"{len(groups)} groups, {len(episodes)} episodes", title_justify="left")
    for name in ("group", "task"):
        table.add_column(name, no_wrap=name == "group", overflow="fold")
    for name in ("success", "mean", "std", "turns"):
        table.add_column(name, justify="right")
    table.add_column("returns")
    for number, members in enumerate(list(groups.values())[:MAX_GROUPS], start=1):
        returns = [member.return_ for member in members if member.return_ is not None]
        table.add_row(
            str(number),
            members[0].task_id,
            f"{sum(member.success for member in members)}/{len(returns)}",
            f"{np.mean(returns):.2f}" if returns else "-",
            f"{np.std(returns):.2f}" if returns else "-",
            f"{np.mean([member.num_steps for member in members]):.1f}",
            Text(" ").join(_member(member) for member in members),
        )
    if len(groups) > MAX_GROUPS:
        table.caption = f"and {len(groups) - MAX_GROUPS} more groups"
    return table


def _member(episode: EpisodeLine) -> Text:
    if episode.return_ is None:
        return Text("failed", "red")
    style = ("green" if episode.success else "") if episode.has_signal else "dim"
    return Text(f"{episode.return_:.2f}", style)


def _print_trajectory(sample: TrajectorySample, console: Console, tokenizer: Any) -> None:
    trajectory = sample.trajectory
    for t in range(len(trajectory.transitions)):
        trained = sample.steps[t] if sample.steps is not None else None
        row = "" if trained is None else f", row {trained.row + 1}"
        console.print(Text(f"step {t + 1}{row}", "bold"))
        if trained is not None and trained.fork_reason:
            text = Text(f"a new row begins here: {trained.fork_reason}", "blue")
            console.print(Padding(text, (0, 0, 0, 2)))
        change = state_change(trajectory, t)
        for mark, style, messages in (("-", "red", change.dropped), ("+", "cyan", change.added)):
            for message in messages:
                head = (f"{mark} {message['role']} ", style)
                text = Text.assemble(head, _shortened(str(message.get("content", ""))))
                console.print(Padding(text, (0, 0, 0, 2)))
        console.print(Padding(_action(sample, t, tokenizer), (0, 0, 0, 2)))
        facts = Text(_step_facts(sample, t), "dim")
        console.print(Padding(facts, (0, 0, 0, 2)))
    end = f"{trajectory.stop_reason.value}, return {trajectory.return_:.3f}"
    console.print(Text(f"ended: {end}{', success' if trajectory.success else ''}\n", "bold"))


def _step_facts(sample: TrajectorySample, t: int) -> str:
    transition = sample.trajectory.transitions[t]
    trained = sample.steps[t] if sample.steps is not None else None
    terms = ", ".join(f"{name} {value:+.3f}" for name, value in transition.reward_terms.items())
    facts = [f"reward {transition.reward:+.3f} ({terms})"]
    if trained is not None and trained.advantages:
        facts.append(f"advantage {np.mean(trained.advantages):+.3f}")
        if trained.values:
            facts.append(f"value {trained.values[0]:+.3f}")
    if code := (transition.info.get("action") or {}).get("error"):
        facts.append(f"mistake {code}")
    return ", ".join(facts)


def _action(sample: TrajectorySample, t: int, tokenizer: Any) -> Text:
    """Return the action's tokens, coloured by advantage; dim where they are not trained."""
    text = Text()
    trained = sample.steps[t] if sample.steps is not None else None
    for j, token in enumerate(sample.trajectory.transitions[t].completion_ids):
        style = "dim"
        if trained is not None and trained.is_trained[j]:
            advantage = trained.advantages[j]
            style = "green" if advantage > 1e-6 else "red" if advantage < -1e-6 else ""
        text.append(tokenizer.decode([token]), style)
        text.append(" ", "dim")
    return text


def _rows(record: BatchRecord, first: int) -> Table:
    """Return some rows: those of the trajectory shown, then the others."""
    numbers = sorted(range(len(record.rows)), key=lambda i: record.rows[i].episode != first)
    all_advantages = record.tensors["advantages"].float().cpu().numpy()
    table = Table(title=f"{len(record.rows)} rows of the main process", title_justify="left")
    table.add_column("trajectory", justify="right")
    table.add_column("steps")
    for name in ("prompt", "completion", "trained"):
        table.add_column(name, justify="right")
    table.add_column("advantage of each step")
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
