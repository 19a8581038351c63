"""Compare recorded episodes with what comes of their actions when they are played again."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import AgentEnvsError
from agent_trainers.trajectory import StopReason
from benchmarks.leaderboard.agent import AGENTS
from benchmarks.leaderboard.playing import Chunk, play_chunk
from benchmarks.leaderboard.replay import ReplayedEpisode, Replayer
from benchmarks.leaderboard.run_folder import (
    AgentRecord,
    EnvironmentRecord,
    Protocol,
    ResultLine,
    TaskEntry,
)

FAULTS: Final = (StopReason.TIMEOUT, StopReason.ENVIRONMENT_ERROR, StopReason.POLICY_ERROR)


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
    """Return what is wrong with lines, in the order of the file: file, line, field, what."""
    replayer = Replayer(job.environment, job.agent, job.data)
    problems = []
    for number, line in job.lines:
        place = f"{job.file}, line {number}"
        try:
            again = replayer.replay(line)
        except Exception as error:  # noqa: BLE001 - whatever stands in the file; it is reported
            problems.append(f"{place}, field 'actions': cannot be played again: {error}")
            continue
        problems += [f"{place}, {text}" for text in compare(line, again)]
    replayer.close()
    return problems + list(_compare_with_program(job))


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
    for name, value in truth.items():
        recorded = getattr(line, name)
        if recorded != value:
            yield f"field {name.rstrip('_')!r}: is {_shown(recorded)}, replay gives {_shown(value)}"
    allowed = possible_stop_reasons(again)
    if line.stop_reason not in allowed:
        names = " or ".join(sorted(allowed))
        yield f"field 'stop_reason': is '{line.stop_reason}', replay gives {names}"


def possible_stop_reasons(again: ReplayedEpisode) -> set[StopReason]:
    """Return why an episode can have ended, seen from the environment alone."""
    if again.terminated:
        return {StopReason.ANSWERED}
    if again.truncated:
        return {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
    # It could have gone on: the policy was at its limit, or something failed.
    return {StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW, *FAULTS}


def _compare_with_program(job: ReplayJob) -> Iterator[str]:
    """Yield where an agent without a model acts otherwise than it is said to have done."""
    kind = AGENTS.get(job.agent.kind)
    if kind is None or kind.needs_model:
        return
    chunk = Chunk(
        environment=job.environment,
        agent=job.agent,
        agent_settings=job.agent.settings,
        protocol=job.protocol,
        episodes=[(_entry(line), line.sample) for _, line in job.lines],
        data=job.data,
    )
    try:
        played = play_chunk(chunk)
    except AgentEnvsError as error:
        yield f"manifest.json, agent {job.agent.slug!r}: {error}"
        return
    for (number, line), timed in zip(job.lines, played, strict=True):
        if line.error is None and timed.line.error is None and line.actions != timed.line.actions:
            yield (
                f"{job.file}, line {number}, field 'actions': are not what the agent "
                f"{job.agent.slug!r} does: {_shown(timed.line.actions)}"
            )


def _entry(line: ResultLine) -> TaskEntry:
    return TaskEntry(
        task=line.task, task_id=line.task_id, sha256=line.task_sha256, labels=line.labels
    )


def _shown(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
