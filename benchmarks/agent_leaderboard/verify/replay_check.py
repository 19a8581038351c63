"""Compare recorded episodes with what comes of their actions when they are played again."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_envs.errors import AgentEnvsError
from agent_leaderboard.agents.agent import acts_by_rules
from agent_leaderboard.play.episodes import (
    FAULTS,
    Chunk,
    digest,
    play_episodes,
    withholds_actions,
)
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.verify.replay import ReplayedEpisode, Replayer
from agent_trainers.trajectory import StopReason


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


def check_lines(job: ReplayJob) -> list[str]:
    """Return what is wrong with lines: file, line, field, what.

    What does not agree is played once more by itself: a program that reached its time limit on a
    busy machine is no forgery, and a forgery stays one.
    """
    try:
        problems = _check(job)
        doubtful = [entry for entry in job.lines if problems.get(entry[0])]
        if doubtful:
            problems = _check(dataclasses.replace(job, lines=doubtful))
    except AgentEnvsError as error:
        return [f"manifest.json, agent {job.agent.slug!r}: {error}"]
    return [text for texts in problems.values() for text in texts]


def _check(job: ReplayJob) -> dict[int, list[str]]:
    """Return what is wrong with each line, by its number in the file."""
    programmed = _ask_program(job)
    replayer = Replayer(job.environment, job.agent, job.data)
    problems = {}
    for index, (number, line) in enumerate(job.lines):
        place = f"{job.file}, line {number}"
        actions = None if programmed is None else programmed[index]
        texts = _check_line(replayer, job, line, actions)
        problems[number] = [f"{place}, {text}" for text in texts]
    replayer.close()
    return problems


def _check_line(
    replayer: Replayer, job: ReplayJob, line: ResultLine, programmed: list[str] | None
) -> Iterator[str]:
    actions = line.actions
    if programmed is not None and line.error is None:
        is_withheld = withholds_actions(job.environment, job.agent)
        recorded = [digest(action) for action in programmed] if is_withheld else programmed
        actions = programmed
        if recorded != line.actions:
            shown = _shown(recorded)
            yield f"field 'actions': are not what the agent {job.agent.slug!r} does: {shown}"
            actions = programmed if is_withheld else line.actions
    try:
        again = replayer.replay_actions(line.task, line.seed, actions)
    except Exception as error:  # noqa: BLE001 - whatever stands in the file; it is reported
        yield f"field 'actions': cannot be played again: {error}"
        return
    yield from compare(line, again)


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
    """Yield each field of a record that is not what `truth` says."""
    for name, value in truth.items():
        if (recorded := getattr(record, name)) != value:
            yield f"field {name.rstrip('_')!r}: is {show(recorded)}, {says} {show(value)}"


def possible_stop_reasons(again: ReplayedEpisode) -> set[StopReason]:
    """Return why an episode can have ended, seen from the environment alone."""
    if again.terminated:
        return {StopReason.ANSWERED}
    if again.truncated:
        return {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
    # It could have gone on: the policy was at its limit, or something failed.
    return {StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW, *FAULTS}


def _ask_program(job: ReplayJob) -> list[list[str]] | None:
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
    return [played.actions for played, _ in play_episodes(chunk)]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
