"""Episodes for readers: which ones to show, their text by replay, and why they failed.

Results contain actions and scores only. Other text is shown only where it may be published: in
environments that generate their own tasks, or on request.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from agent_envs.errors import DataError
from agent_leaderboard.play.replay import ReplayedEpisode, Replayer
from agent_leaderboard.records.manifest import EnvironmentRecord
from agent_leaderboard.records.results import Cell, EpisodeResult, Run, TaskEntry
from agent_trainers.trajectory import StopReason

FAILURES_PER_SUCCESS: Final = 3
_REASONS: Final[Mapping[StopReason, str]] = {
    StopReason.ANSWERED: "The episode ended by itself, but the task was not solved.",
    StopReason.TURN_LIMIT: "The turn limit was reached.",
    StopReason.TOKEN_LIMIT: "A turn was cut off because it was too long.",
    StopReason.CONTEXT_OVERFLOW: "The conversation no longer fitted the model.",
    StopReason.TIMEOUT: "The environment did not reply in time.",
    StopReason.ENVIRONMENT_ERROR: "The environment failed.",
    StopReason.POLICY_ERROR: "The model's server failed.",
    StopReason.LEFT_OUT: "It was stopped before it ended.",
}
TEXT_IS_LICENSED: Final = (
    "The text of this data set is not published here. To see it, run report with --data and --text "
    "on a machine that has the data."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """An episode to show."""

    result: EpisodeResult
    entry: TaskEntry
    text: ReplayedEpisode | None
    """The replayed episode, if its text may be shown."""
    note: str | None
    """Why there is no text."""
    reasons: Sequence[str]
    """Why it failed, and which errors it had."""


def make_transcripts(
    run: Run, cell: Cell, data: Path | None, *, with_text: bool, limit: int | None = None
) -> Iterator[Transcript]:
    """Yield the episodes of an agent in an environment, or at most `limit` of them.

    With `with_text` they are replayed with the data folder; a replay may fail or differ, with other
    data or a newer environment.
    """
    manifest = run.manifest
    environment, agent = manifest.environment(cell[0]), manifest.agent(cell[1])
    entries = {entry.task: entry for entry in run.tasks[cell[0]]}
    results = run.results[cell]
    replayer: Replayer | None = None
    note: str | None = TEXT_IS_LICENSED
    if with_text:
        try:
            replayer = Replayer(environment, agent, manifest.protocol, data)
        except Exception as error:  # noqa: BLE001 - any environment; the note has it
            note = _failure(error)
    for result in results if limit is None else choose(results, limit):
        text, why_none = None, note
        if replayer is not None:
            try:
                text, why_none = _replay(replayer, result, entries[result.task]), None
            except Exception as error:  # noqa: BLE001 - any environment; the note has it
                why_none = _failure(error)
        yield Transcript(
            result=result,
            entry=entries[result.task],
            text=text,
            note=why_none,
            reasons=explain(result, environment),
        )
    if replayer is not None:
        replayer.close()


def _replay(replayer: Replayer, result: EpisodeResult, entry: TaskEntry) -> ReplayedEpisode:
    actions, *_ = replayer.open(result, entry)
    episode = replayer.replay(result, actions)
    pairs = zip(episode.steps, result.rewards, strict=True)
    for number, (step, recorded) in enumerate(pairs, start=1):
        if step.reward != recorded:
            raise DataError(f"step {number} has reward {step.reward:g}, {recorded:g} was recorded.")
    return episode


def _failure(error: Exception) -> str:
    return f"Replay failed: {type(error).__name__}: {error}"


def choose(results: Sequence[EpisodeResult], limit: int) -> list[EpisodeResult]:
    """Choose at most `limit` episodes: three failures for each success.

    A smaller choice is the beginning of a larger one.
    """
    failures = iter([result for result in results if not result.success])
    successes = iter([result for result in results if result.success])
    chosen: list[EpisodeResult] = []
    while len(chosen) < min(limit, len(results)):
        chosen += islice(failures, FAILURES_PER_SUCCESS)
        chosen += islice(successes, 1)
    return chosen[:limit]


def explain(result: EpisodeResult, environment: EnvironmentRecord) -> list[str]:
    """Return why an episode failed, and which errors it had."""
    reasons = []
    if result.error is not None:
        reasons.append("It ended by an infrastructure failure.")
    if not result.success:
        reasons.append(_REASONS[result.stop_reason])
        missed = [
            name
            for name in environment.outcome_terms
            if not sum(terms.get(name, 0.0) for terms in result.reward_terms)
        ]
        if missed and result.error is None:
            reasons.append(f"No reward for {', '.join(missed)}.")
    if errors := [f"step {i} ({code})" for i, code in enumerate(result.errors, start=1) if code]:
        reasons.append(f"Errors: {', '.join(errors)}.")
    return reasons
