"""What ``--dry_run`` prints: groups, one trajectory step by step, rows, figures, time, memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.trajectory_samples import TrajectorySample, state_change

MAX_GROUPS: Final = 10
MAX_ROWS: Final = 12
MAX_MESSAGE_CHARS: Final = 400
STRIP_WIDTH: Final = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine:
    """An episode in a few numbers."""

    group_id: str
    """Its group."""
    task_id: str
    """Its task."""
    return_: float
    """Sum of its rewards."""
    success: bool
    """Whether it counts as a success."""
    is_scorable: bool
    """Whether it counts at all."""
    num_steps: int
    """Model turns."""
    has_signal: bool
    """Whether any of its advantages is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A batch, and what it cost."""

    title: str
    """What ran."""
    num_processes: int
    """How many processes shared the batch."""
    max_steps: int
    """Optimiser steps of the run that this would be."""
    episodes: Sequence[EpisodeLine]
    """All episodes of the batch."""
    rows: Sequence[Row]
    """Rows of the main process."""
    sample: TrajectorySample
    """A trajectory of the main process."""
    sample_number: int
    """Its number in the batch of the main process."""
    advantages: npt.NDArray[np.float32]
    """What the rows' tokens are trained with, (B, T)."""
    figures: Mapping[str, str]
    """Figures of the batch, by name."""
    seconds: Mapping[str, float]
    """Wall time of the step by part."""
    memory: Mapping[str, str]
    """What is held in memory."""
    page: Path
    """The page of trajectories."""


def print_dry_run(run: DryRun, console: Console, tokenizer: Any) -> None:
    """Print a dry run.

    Args:
        run: What was found.
        console: Where.
        tokenizer: Turns token ids back into text.
    """
    console.rule(f"[bold]dry run: {run.title}", align="left")
    console.print(_groups(run.episodes))
    console.rule(f"trajectory {run.sample_number + 1}, step by step", align="left")
    _print_trajectory(run.sample, console, tokenizer)
    console.print(_rows(run))
    for number, row in enumerate(run.sample.rows, start=1):
        console.print(_mask(number, row))
    console.print("[dim]▒ prompt   ░ observation, masked   █ trained[/]\n")
    console.print(_facts("the batch", run.figures))
    console.print(_facts("one optimiser step", _times(run)))
    console.print(_facts("memory", run.memory))
    console.print(f"{'trajectories':>24}: {run.page}", highlight=False, soft_wrap=True)
    console.print("No weights were changed and none saved.")


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
        scored = [member for member in members if member.is_scorable]
        returns = [member.return_ for member in scored]
        table.add_row(
            str(number),
            members[0].task_id,
            f"{sum(member.success for member in scored)}/{len(scored)}",
            f"{np.mean(returns):.2f}" if returns else "-",
            f"{np.std(returns):.2f}" if returns else "-",
            f"{np.mean([member.num_steps for member in members]):.1f}",
            Text(" ").join(_member(member) for member in members),
        )
    if len(groups) > MAX_GROUPS:
        table.caption = f"and {len(groups) - MAX_GROUPS} more groups"
    return table


def _member(episode: EpisodeLine) -> Text:
    if not episode.is_scorable:
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


def _rows(run: DryRun) -> Table:
    """Return the first rows: those of the trajectory shown, then the others."""
    numbers = sorted(range(len(run.rows)), key=lambda i: run.rows[i].episode != run.sample_number)
    table = Table(title=f"{len(run.rows)} rows of the main process", title_justify="left")
    table.add_column("trajectory", justify="right")
    table.add_column("steps")
    for name in ("prompt", "completion", "trained"):
        table.add_column(name, justify="right")
    table.add_column("advantage of each step")
    for i in numbers[:MAX_ROWS]:
        row = run.rows[i]
        steps = list(dict.fromkeys(np.array(row.steps)[np.array(row.is_action, bool)].tolist()))
        is_action, row_steps = np.array(row.is_action, bool), np.array(row.steps)
        own = run.advantages[i, : len(row.steps)]
        means = [own[is_action & (row_steps == step)].mean() for step in steps]
        table.add_row(
            str(row.episode + 1),
            f"{steps[0] + 1}" if len(steps) == 1 else f"{steps[0] + 1} to {steps[-1] + 1}, merged",
            str(len(row.prompt_ids)),
            str(len(row.completion_ids)),
            str(sum(row.is_trained)),
            " ".join(f"{mean:+.2f}" for mean in means),
        )
    if len(run.rows) > MAX_ROWS:
        table.caption = f"and {len(run.rows) - MAX_ROWS} more rows"
    return table


def _mask(number: int, row: Row) -> Text:
    """Draw which tokens of a row are trained, one character for each, or for several."""
    kinds = ["▒"] * len(row.prompt_ids) + ["█" if trained else "░" for trained in row.is_trained]
    width = min(STRIP_WIDTH, len(kinds))
    strip = "".join(kinds[i * len(kinds) // width] for i in range(width))
    return Text.assemble((f"row {number} ", "dim"), strip)


def _times(run: DryRun) -> dict[str, str]:
    seconds = run.seconds
    total = seconds["rollout"] + seconds["score"] + seconds["train"]
    processes = f" on {run.num_processes} processes" if run.num_processes > 1 else ""
    return {
        "generate": f"{seconds['rollout'] - seconds['wait']:.2f} s",
        "wait for environments": f"{seconds['wait']:.2f} s",
        "score": f"{seconds['score']:.2f} s",
        "forward and backward": f"{seconds['train']:.2f} s",
        "in all": f"{total:.2f} s{processes}, the optimiser's update not included; "
        f"{run.max_steps:,} steps would take about {_duration(total * run.max_steps)}",
    }


def _facts(title: str, facts: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = title, "left"
    table.add_column(justify="right", style="dim", min_width=24)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _shortened(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    return f"{text[:MAX_MESSAGE_CHARS]} … ({len(text) - MAX_MESSAGE_CHARS} more characters)"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
