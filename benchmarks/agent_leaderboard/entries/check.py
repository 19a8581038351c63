"""Try agents on five tasks before a run: what they did, and whether others can replay it."""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_envs.errors import ConfigurationError, MissingExtraError
from agent_leaderboard.entries.submit import unfit_fields
from agent_leaderboard.play.config import EnvironmentConfig, RunConfig
from agent_leaderboard.play.data_files import missing_data, reads_data
from agent_leaderboard.play.episodes import environment_maker
from agent_leaderboard.play.run import run
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.visible_text import visible
from agent_leaderboard.verify.verify import check_run

NUM_TASKS: Final = 5
_MAX_CHARS: Final = 300


def check_entry(config: RunConfig, data: Path | None, console: Console) -> bool:
    """Play five tasks by each agent, show what came of them, and verify it as others would.

    The tasks come from as many environments as are at hand, those that need no data first. Returns
    whether every episode was scored and every one replays.
    """
    with tempfile.TemporaryDirectory(prefix="agent-r1-check-") as scratch:
        folder = run(five_tasks(config, data), Path(scratch) / "run", data=data)
        lines = list(_lines(folder))
        console.print(_table(lines))
        for line in lines:
            for text in _remarks(line):
                console.print(Text(f"{line.agent} on {line.environment}: {visible(text)}"))
        for agent in config.agents:
            for text in unfit_fields(agent):
                console.print(Text(f"{agent.name} {text}: submit will refuse it"))
        verification = check_run(folder.path, data)
        # Five tasks are fewer than any board's, so that they are another measure says nothing.
        console.print(Text(replace(verification, own_measure={}).summary()))
        return not verification.problems and all(line.is_scored for line in lines)


def five_tasks(config: RunConfig, data: Path | None) -> RunConfig:
    """Return the run with five tasks, of as many environments as are at hand.

    Raises:
        ConfigurationError: If none is.
    """
    plain = [each for each in config.environments if each.attack_on is None]
    plain.sort(key=reads_data)
    chosen = list(itertools.islice((each for each in plain if _is_at_hand(each, data)), NUM_TASKS))
    if not chosen:
        raise ConfigurationError(
            "None of these environments is at hand: each lacks its data (--data) or its extra. "
            "Choose others with --environments."
        )
    share, more = divmod(NUM_TASKS, len(chosen))
    return replace(
        config,
        protocol=replace(config.protocol, samples_per_task=1),
        environments=tuple(
            replace(each, tasks=min(each.tasks, share + (i < more)))
            for i, each in enumerate(chosen)
        ),
        left_out=(),
    )


def _is_at_hand(environment: EnvironmentConfig, data: Path | None) -> bool:
    """Return whether an environment can be played here; one that is not optional has to be."""
    if not environment.optional:
        return True
    if missing_data(environment, data):
        return False
    try:
        environment_maker(environment, None, data)().close()
    except MissingExtraError:
        return False
    return True


def _lines(folder: RunFolder) -> Iterator[ResultLine]:
    for environment, agent in folder.read_manifest().cells:
        yield from folder.read_results(environment.slug, agent.slug)


def _table(lines: list[ResultLine]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("agent", "environment", "task"):
        table.add_column(heading)
    for heading in ("turns", "return", "success", "calls", "tokens"):
        table.add_column(heading, justify="right")
    for line in lines:
        usage = line.usage
        table.add_row(
            line.agent,
            line.environment,
            Text(visible(line.task_id)),
            str(len(line.actions)),
            f"{line.return_:.2f}",
            "fault" if not line.is_scored else "yes" if line.success else "no",
            str(usage.calls),
            str(usage.prompt_tokens + usage.completion_tokens),
        )
    return table


def _remarks(line: ResultLine) -> Iterator[str]:
    """Yield what an author wants to know of an episode: a fault, the first mistake."""
    if line.error is not None:
        yield f"ended by a fault: {line.error}"
    for number, (action, code) in enumerate(zip(line.actions, line.errors, strict=True), start=1):
        if code is not None:
            yield f"turn {number} was a mistake ({code}): {action[:_MAX_CHARS]!r}"
            return
