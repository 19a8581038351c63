"""Compare recorded episodes with what comes of their actions when they are played again."""

import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import AgentEnvsError
from agent_leaderboard.agents.agent import PlayedEpisode, acts_by_rules
from agent_leaderboard.play.episodes import FAULTS, Chunk, play_episodes
from agent_leaderboard.play.replay import ReplayedEpisode, Replayer
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.verify.claims import check_tokens
from agent_trainers.trajectory import StopReason

SECONDS_PER_JOB: Final = 120
SECONDS_PER_LINE: Final = 20
"""What replay may take at most; the slowest programs are stopped by the sandbox long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """Lines of one file to be played again."""

    file: str
    environment: EnvironmentRecord
    agent: AgentRecord
    protocol: Protocol
    lines: Sequence[tuple[int, ResultLine]]
    """Each with its number in the file."""
    data: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a job."""

    problems: Sequence[str]
    """What is wrong: file, line, field, what."""
    num_right: int
    """Episodes that succeed when they are played again."""


def check_lines(job: ReplayJob) -> Replayed:
    """Play lines again.

    What does not agree is played once more by itself: a program that reached its time limit on a
    busy machine is no forgery, and a forgery stays one.
    """
    try:
        with _deadline(SECONDS_PER_JOB + SECONDS_PER_LINE * len(job.lines)):
            problems, right = _check(job)
            doubtful = [entry for entry in job.lines if problems.get(entry[0])]
            if doubtful:
                problems, again = _check(dataclasses.replace(job, lines=doubtful))
                right = right | again
    except Exception as error:  # noqa: BLE001 - environments of all kinds; the cell is named
        name = "" if isinstance(error, AgentEnvsError) else f"{type(error).__name__}: "
        return Replayed(
            problems=[f"{job.file}: cannot be played again: {name}{error}"], num_right=0
        )
    texts = [text for own in problems.values() for text in own]
    return Replayed(problems=texts, num_right=len(right))


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after so many seconds, where signals can be had."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:,.0f} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check(job: ReplayJob) -> tuple[dict[int, list[str]], set[int]]:
    """Return what is wrong with each line, by its number, and the numbers of those that succeed."""
    asked = _ask_program(job)
    replayer = Replayer(job.environment, job.agent, job.data)
    problems: dict[int, list[str]] = {}
    right: set[int] = set()
    for index, (number, line) in enumerate(job.lines):
        place = f"{job.file}, line {number}"
        try:
            texts, is_right = _check_line(
                replayer, job, line, None if asked is None else asked[index]
            )
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever stands in the file; it is reported
            texts, is_right = [f"field 'actions': cannot be played again: {error}"], False
        problems[number] = [f"{place}, {text}" for text in texts]
        if is_right:
            right.add(number)
    replayer.close()
    return problems, right


def _check_line(
    replayer: Replayer, job: ReplayJob, line: ResultLine, asked: PlayedEpisode | None
) -> tuple[list[str], bool]:
    actions, *attempts = replayer.open(line)
    texts = list(_check_asked(line, actions, asked))
    again = replayer.replay_actions(line.task, line.seed, actions)
    texts += compare(line, again)
    written = "\n".join(action for attempt in (actions, *attempts) for action in attempt)
    texts += check_tokens(line, job.agent, written, again.question)
    succeeds = again.metrics.get("success", 0.0) > 0.0
    return texts, succeeds and line.is_scored


def _check_asked(
    line: ResultLine, actions: Sequence[str], asked: PlayedEpisode | None
) -> Iterator[str]:
    """Yield what an agent that was asked again does otherwise, a fault that is none included."""
    if asked is None:
        return
    if line.error is not None and asked.trajectory.stop_reason not in FAULTS:
        yield f"field 'error': is {_shown(line.error)}, but the agent, asked again, plays it"
        return
    if line.error is None and list(asked.actions) != list(actions):
        shown = _shown(asked.actions)
        yield f"field 'actions': are not what the agent {line.agent!r} does: {shown}"


def compare(line: ResultLine, again: ReplayedEpisode) -> Iterator[str]:
    """Yield each field of a line that is not what replay gives."""
    truth: Mapping[str, Any] = {
        "task_id": again.task_id,
        "task_sha256": again.task_sha256,
        "labels": again.labels,
        "rewards": [step.reward for step in again.steps],
        "reward_terms": [step.reward_terms for step in again.steps],
        "errors": [step.error for step in again.steps],
        "metrics": again.metrics,
        "return_": float(sum(step.reward for step in again.steps)),
        "success": again.metrics.get("success", 0.0) > 0.0,
    }
    yield from differences(line, truth, "replay gives", _shown)
    allowed = possible_stop_reasons(again)
    if line.stop_reason not in allowed:
        names = " or ".join(sorted(allowed))
        yield f"field 'stop_reason': is '{line.stop_reason}', replay gives {names}"


def differences(
    record: object, truth: Mapping[str, Any], says: str, show: Callable[[Any], str] = repr
) -> Iterator[str]:
    """Yield each field of a record that is not, as JSON, what `truth` says: -0.0 is not 0.0."""
    for name, value in truth.items():
        recorded = getattr(record, name)
        if json.dumps(recorded, sort_keys=True) != json.dumps(value, sort_keys=True):
            yield f"field {name.rstrip('_')!r}: is {show(recorded)}, {says} {show(value)}"


def possible_stop_reasons(again: ReplayedEpisode) -> set[StopReason]:
    """Return why an episode can have ended, seen from the environment alone."""
    if again.terminated:
        return {StopReason.ANSWERED}
    if again.truncated:
        return {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
    # It could have gone on: the policy was at its limit, or something failed.
    return {StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW, *FAULTS}


def _ask_program(job: ReplayJob) -> list[PlayedEpisode] | None:
    """Return what an agent without a model does, for each line; None for one on a model."""
    if not acts_by_rules(job.agent.kind):
        return None
    chunk = Chunk(
        environment=job.environment,
        agent=job.agent,
        agent_settings=job.agent.settings,
        protocol=job.protocol,
        episodes=[(line.task_entry, line.sample) for _, line in job.lines],
        data=job.data,
    )
    return [played for played, _ in play_episodes(chunk)]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
