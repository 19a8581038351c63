"""Episodes as people look at them: which ones, what was said in them, and why they failed.

Results hold actions and scores only. What the environment said is found by playing the actions
again, and is published only where the text may be: in environments that make their own tasks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from agent_envs.errors import DataError
from agent_leaderboard.play.replay import ReplayedEpisode, Replayer
from agent_leaderboard.records.manifest import EnvironmentRecord, Manifest
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.report.summary import PlayedRun
from agent_trainers.trajectory import StopReason

FAILURES_PER_SUCCESS: Final = 3
_WHY: Final[Mapping[StopReason, str]] = {
    StopReason.ANSWERED: "The episode ended by itself, but the task was not solved.",
    StopReason.TURN_LIMIT: "No turns were left.",
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
class EpisodeView:
    """An episode to look at."""

    line: ResultLine
    seconds: float | None
    """How long it took, if that was kept."""
    text: ReplayedEpisode | None
    """What was said, where it may be shown."""
    note: str | None
    """Why there is no text."""
    why: Sequence[str]
    """Why it failed, or what went wrong on the way."""


class TextSource:
    """Finds what was said in recorded episodes; keeps the environment of the last one."""

    def __init__(self, manifest: Manifest, data: Path | None) -> None:
        """Play with the data sets below the folder `data`; None where none is needed."""
        self._manifest, self._data = manifest, data
        self._key: tuple[str, str] | None = None
        self._replayer: Replayer | None = None

    def find(self, line: ResultLine) -> tuple[ReplayedEpisode | None, str | None]:
        """Play an episode again; return what was said in it, or why that is not known.

        It may go otherwise than it was recorded: with other data, or a newer environment.
        """
        try:
            episode = self._open(line).replay(line)
            pairs = zip(episode.steps, line.rewards, strict=True)
            for number, (step, recorded) in enumerate(pairs, start=1):
                if step.reward != recorded:
                    raise DataError(
                        f"step {number} earns {step.reward:g} here; {recorded:g} was recorded."
                    )
            return episode, None
        except Exception as error:  # noqa: BLE001 - environments of others; the page says it
            return None, f"The text could not be made again: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the environment."""
        if self._replayer is not None:
            self._replayer.close()
        self._replayer = self._key = None

    def _open(self, line: ResultLine) -> Replayer:
        key = line.environment, line.agent
        if self._replayer is None or self._key != key:
            self.close()
            environment = self._manifest.environment(line.environment)
            agent = self._manifest.agent(line.agent)
            self._replayer, self._key = Replayer(environment, agent, self._data), key
        return self._replayer


def choose(lines: Sequence[ResultLine], limit: int) -> list[ResultLine]:
    """Choose at most `limit` episodes to show: three failures, a success, and so on.

    The choice of a smaller number is the beginning of that of a larger one.
    """
    failures = iter([line for line in lines if not line.success])
    successes = iter([line for line in lines if line.success])
    chosen: list[ResultLine] = []
    while len(chosen) < min(limit, len(lines)):
        chosen += islice(failures, FAILURES_PER_SUCCESS)
        chosen += islice(successes, 1)
    return chosen[:limit]


def view_episodes(
    run: PlayedRun, cell: tuple[str, str], source: TextSource | None, *, limit: int | None = None
) -> Iterator[EpisodeView]:
    """Yield the episodes of an agent in an environment, all or those that are worth showing.

    What was said in them comes from `source`; None where the text is not to be shown.
    """
    environment = run.manifest.environment(cell[0])
    lines, seconds = run.lines[cell], run.seconds.get(cell, ())
    took = {(line.task, line.sample): s for line, s in zip(lines, seconds, strict=False)}
    for line in lines if limit is None else choose(lines, limit):
        text, note = source.find(line) if source else (None, TEXT_IS_LICENSED)
        yield EpisodeView(
            line=line,
            seconds=took.get((line.task, line.sample)),
            text=text,
            note=note,
            why=explain(line, environment),
        )


def explain(line: ResultLine, environment: EnvironmentRecord) -> list[str]:
    """Say why an episode failed, and what went wrong on the way."""
    reasons = []
    if line.error is not None:
        reasons.append("A fault of the infrastructure ended it.")
    if not line.success:
        reasons.append(_WHY[line.stop_reason])
        missed = [
            name
            for name in environment.outcome_terms
            if not sum(terms.get(name, 0.0) for terms in line.reward_terms)
        ]
        if missed and line.error is None:
            reasons.append(f"It earned nothing for {', '.join(missed)}.")
    if mistakes := [
        f"step {number} ({code})" for number, code in enumerate(line.errors, start=1) if code
    ]:
        reasons.append(f"Mistakes: {', '.join(mistakes)}.")
    return reasons
