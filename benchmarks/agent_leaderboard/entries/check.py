"""Check agents on five tasks before a run: their errors, and whether others can replay them."""

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent_envs.errors import ConfigurationError, MissingExtraError
from agent_leaderboard.entries.submit import invalid_fields
from agent_leaderboard.play.config import EnvironmentConfig, RunConfig
from agent_leaderboard.play.environments import configured_environment, missing_data, reads_data
from agent_leaderboard.play.run import run
from agent_leaderboard.records.results import EpisodeResult, Run, read_run
from agent_leaderboard.report.visible_text import visible
from agent_leaderboard.verify.verify import check_run

NUM_TASKS: Final = 5


def check_entry(config: RunConfig, data: Path | None) -> tuple[bool, str]:
    """Run each agent on five tasks, and verify the episodes as others would.

    The tasks come from as many environments as are available, those without data first. Returns
    whether every episode was scored and verified, and what came of each.
    """
    with tempfile.TemporaryDirectory(prefix="agent-r1-check-") as scratch:
        folder = run(five_tasks(config, data), Path(scratch) / "run", data=data)
        finished = read_run(folder)
        verification = check_run(folder, data)
    results = [result for own in finished.results.values() for result in own]
    lines = [line for one in results for line in _describe(one, finished)]
    for agent in config.agents:
        lines += [f"{agent.name} {text}: submit will refuse it" for text in invalid_fields(agent)]
    # Five tasks are never the published measure.
    lines.append(replace(verification, own_measure={}).summary())
    is_fine = not verification.problems and all(result.is_scored for result in results)
    return is_fine, "\n".join(map(visible, lines))


def five_tasks(config: RunConfig, data: Path | None) -> RunConfig:
    """Return the run with five tasks, of as many environments as are available."""
    plain = [each for each in config.environments if each.attack_on is None]
    plain.sort(key=reads_data)
    available = (each for each in plain if _is_available(each, data))
    chosen = list(itertools.islice(available, NUM_TASKS))
    if not chosen:
        raise ConfigurationError(
            "No environment is available: each lacks its data (--data) or its extra. Choose others "
            "with --environments."
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


def _is_available(environment: EnvironmentConfig, data: Path | None) -> bool:
    """Return whether an environment can be made; one that is not optional must be."""
    if not environment.optional:
        return True
    if missing_data(environment, data):
        return False
    try:
        configured_environment(environment, None, data)().close()
    except MissingExtraError:
        return False
    return True


def _describe(one: EpisodeResult, run: Run) -> Iterator[str]:
    """Yield what came of an episode: also its failure, and its first error."""
    (entry,) = [entry for entry in run.tasks[one.environment] if entry.task == one.task]
    yield (
        f"{one.agent} on {one.environment}, {entry.task_id}: {len(one.actions)} turns, return "
        f"{one.return_:.2f}, {'success' if one.success else 'no success'}, {one.calls} calls, "
        f"{one.prompt_tokens + one.completion_tokens} tokens"
    )
    if one.error is not None:
        yield f"  ended by an infrastructure failure: {one.error}"
    for number, (action, code) in enumerate(zip(one.actions, one.errors, strict=True), 1):
        if code is not None:
            yield f"  turn {number} was an error ({code}): {action[:300]!r}"
            return
