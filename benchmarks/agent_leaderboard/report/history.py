"""Runs of the same board over time: what changed between one and the next."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_envs.errors import DataError
from agent_envs.scoring.statistics import CONFIDENCE, Comparison, compare
from agent_leaderboard.records.manifest import AgentRecord
from agent_leaderboard.report.summary import PlayedRun, read_run, shown_name
from agent_leaderboard.report.terminal import make_console
from agent_leaderboard.report.visible_text import visible

RULE: Final = (
    "Differences of success in points, on the tasks that both runs hold with the same content. The "
    "p-value is that of the exact paired test over tasks, not corrected for the number of rows."
)
_OF_THE_AGENT: Final = ("kind", "model", "weights_sha256", "tool_format", "settings", "train")


def print_history(paths: Sequence[Path], console: Console | None = None) -> None:
    """Print, for each agent and environment that two runs in a row share, what became of it.

    Raises:
        DataError: If there are fewer than two runs, or they share nothing.
    """
    if len(paths) < 2:
        raise DataError("history: give two run folders or more, the oldest first.")
    console = console or make_console()
    runs = [read_run(path) for path in paths]
    for (old_path, old), (new_path, new) in zip(
        zip(paths, runs, strict=True), list(zip(paths, runs, strict=True))[1:], strict=False
    ):
        table = _table(f"{old_path} → {new_path}", old, new)
        if not table.rows:
            raise DataError(f"{old_path} and {new_path} share no task of any agent.")
        console.print(table)
        for text in changes(old, new):
            console.print(Text(visible(text), style="dim"))
    console.print(Text(RULE, style="dim"))


def changes(old: PlayedRun, new: PlayedRun) -> Iterator[str]:
    """Yield what is another one in the newer run: protocol, agents, versions."""
    if old.manifest.protocol != new.manifest.protocol:
        yield f"protocol: {old.manifest.protocol} → {new.manifest.protocol}"
    before = {agent.slug: agent for agent in old.manifest.agents}
    for agent in new.manifest.agents:
        if (one := before.get(agent.slug)) is None:
            yield f"agent {agent.slug}: is new"
            continue
        yield from (f"agent {agent.slug}: {text}" for text in _changed(one, agent))
    for slug in before.keys() - {agent.slug for agent in new.manifest.agents}:
        yield f"agent {slug}: is gone"


def _changed(old: AgentRecord, new: AgentRecord) -> Iterator[str]:
    for name in _OF_THE_AGENT:
        one, other = getattr(old, name), getattr(new, name)
        if one != other:
            yield f"{name}: {one} → {other}"
    for name in sorted(old.packages.keys() | new.packages.keys()):
        one, other = old.packages.get(name), new.packages.get(name)
        if one != other:
            yield f"{name} {one or 'not used'} → {other or 'not used'}"


def compare_runs(
    old: PlayedRun, new: PlayedRun
) -> dict[tuple[str, str], tuple[float, float, Comparison]]:
    """Compare what two runs share, by environment and agent: both scores, and the newer's gain."""
    found = {}
    for environment, agent in new.lines:
        before = _by_content(old, environment, agent)
        after = _by_content(new, environment, agent)
        shared = sorted(before.keys() & after.keys())
        one = {i: before[key] for i, key in enumerate(shared)}
        other = {i: after[key] for i, key in enumerate(shared)}
        comparison = compare(other, one)
        if comparison is not None:
            means = [sum(scores.values()) / len(scores) for scores in (one, other)]
            found[environment, agent] = (means[0], means[1], comparison)
    return found


def _by_content(run: PlayedRun, environment: str, agent: str) -> Mapping[str, float]:
    """Return the share of successes of each task, by the hash of what it is."""
    lines = run.lines.get((environment, agent), ())
    content = {line.task: line.task_sha256 for line in lines}
    return {content[task]: share for task, share in run.task_scores(environment, agent).items()}


def _table(title: str, old: PlayedRun, new: PlayedRun) -> Table:
    table = Table(title=Text(visible(title)), box=box.SIMPLE_HEAD)
    table.add_column("environment")
    table.add_column("agent", overflow="fold")
    for heading in ("tasks", "old %", "new %", "change", f"{CONFIDENCE:.0%} interval", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (environment, agent), (before, after, comparison) in compare_runs(old, new).items():
        difference = comparison.difference
        is_sure = difference.low > 0 or difference.high < 0
        table.add_row(
            environment,
            Text(visible(shown_name(new.manifest.agent(agent)))),
            str(difference.count),
            f"{100 * before:.1f}",
            f"{100 * after:.1f}",
            Text(f"{100 * difference.mean:+.1f}", style="bold" if is_sure else ""),
            f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
            f"{comparison.p_value:.3f}",
        )
    return table
