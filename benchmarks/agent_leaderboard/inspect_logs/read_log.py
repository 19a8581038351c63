"""What a log of inspect_ai holds, as the files of a run folder hold it.

A log that was made of a run holds the result lines themselves. Of a log that inspect_ai wrote, the
messages, scores and usage of each sample become a result line; its environment's id says that
nothing can play the episodes again.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import DataError
from agent_leaderboard.inspect_logs.write_log import RECORD_KEY, SUCCESS, LogRecord
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol, make_slug
from agent_leaderboard.records.reading import parse_json, validated
from agent_leaderboard.records.results import (
    LineUsage,
    ResultLine,
    TaskEntry,
    parse_line,
    tasks_text,
)
from agent_leaderboard.report.summary import IMPORTED
from agent_trainers.trajectory import StopReason

NOT_VERIFIABLE: Final = (
    "Not known. Read from a log of inspect_ai: nothing can play the episodes again, so the scores "
    "are not verified."
)
_LIMITS: Final[Mapping[str, StopReason]] = {
    "context": StopReason.CONTEXT_OVERFLOW,
    "token": StopReason.TOKEN_LIMIT,
    "message": StopReason.TURN_LIMIT,
    "turn": StopReason.TURN_LIMIT,
}
_PASSES: Final = ("C", "correct", "yes", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContents:
    """One agent on one environment."""

    record: LogRecord
    lines: list[ResultLine]
    seconds: list[float | None]
    """Seconds of the same episodes."""


def read_contents(path: Path) -> LogContents:
    """Read a log.

    Raises:
        DataError: If it is none, holds no samples, or contradicts itself.
    """
    log = _read(path)
    if not log.samples:
        raise DataError(f"{path}: holds no samples.")
    metadata = log.eval.metadata or {}
    if RECORD_KEY not in metadata:
        return _foreign(log)
    record: LogRecord = validated(LogRecord, parse_json(metadata[RECORD_KEY], path), path)
    order = {entry.task: i for i, entry in enumerate(record.tasks)}
    episodes = [(_recorded_line(sample, path), sample.total_time) for sample in log.samples]
    for line, _ in episodes:
        if line.task not in order:
            raise DataError(f"{path}: task {line.task} is not in its list of tasks.")
    episodes.sort(key=lambda episode: (order[episode[0].task], episode[0].sample))
    return LogContents(
        record=record,
        lines=[line for line, _ in episodes],
        seconds=[seconds for _, seconds in episodes],
    )


def _read(path: Path) -> Any:
    from inspect_ai.log import read_eval_log

    try:
        return read_eval_log(str(path), resolve_attachments=True)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise DataError(
            f"{path}: is no log of inspect_ai ({type(error).__name__}: {reason})."
        ) from None


def _recorded_line(sample: Any, path: Path) -> ResultLine:
    """Return a sample's result line; refuse one whose score was changed after the log was made."""
    place = f"{path}: sample {sample.id!r}, epoch {sample.epoch}"
    line = parse_line(str(sample.metadata.get(RECORD_KEY)).removesuffix("\n"), place)
    score = (sample.scores or {}).get(SUCCESS)
    if score is not None and bool(score.value) != line.success:
        raise DataError(
            f"{place}: the score is {score.value}, but the run recorded success {line.success}."
        )
    return line


# Logs of inspect_ai's own evaluations


def _foreign(log: Any) -> LogContents:
    spec = log.eval
    slug = make_slug(spec.task) or "task"
    tasks = {str(sample.id): sample for sample in log.samples}
    entries = [
        TaskEntry(task=i, task_id=_plain(task_id), sha256=_task_hash(sample), labels={})
        for i, (task_id, sample) in enumerate(sorted(tasks.items()))
    ]
    by_id = {entry.task_id: entry for entry in entries}
    name = f"{spec.model} {spec.solver}" if spec.solver else spec.model
    agent = make_slug(name) or "agent"
    pairs = [(by_id[_plain(str(sample.id))], sample) for sample in log.samples]
    pairs.sort(key=lambda pair: (pair[0].task, pair[1].epoch))
    temperature = spec.model_generate_config.temperature
    protocol = Protocol(
        samples_per_task=max(sample.epoch for sample in log.samples),
        temperature=1.0 if temperature is None else float(temperature),
    )
    environment = EnvironmentRecord(
        slug=slug,
        id=f"{IMPORTED}{_plain(spec.task)}",
        num_tasks=len(entries),
        tasks_path=f"tasks/{slug}.json",
        tasks_sha256=hashlib.sha256(tasks_text(entries).encode()).hexdigest(),
        contamination=NOT_VERIFIABLE,
        is_text_public=False,
    )
    record = AgentRecord(
        slug=agent,
        name=_plain(name),
        kind="inspect_ai",
        model=_plain(spec.model),
        packages={_plain(key): _plain(value) for key, value in spec.packages.items()},
    )
    return LogContents(
        record=LogRecord(protocol=protocol, environment=environment, agent=record, tasks=entries),
        lines=[_line(sample, entry, slug, agent) for entry, sample in pairs],
        seconds=[sample.total_time for _, sample in pairs],
    )


def _line(sample: Any, entry: TaskEntry, environment: str, agent: str) -> ResultLine:
    actions, errors = _turns(sample)
    score = _score(sample)
    rewards = [0.0] * len(actions)
    if rewards:
        rewards[-1] = score
    return ResultLine(
        environment=environment,
        agent=agent,
        task=entry.task,
        task_id=entry.task_id,
        task_sha256=entry.sha256,
        sample=sample.epoch - 1,
        seed=0,
        actions=actions,
        rewards=rewards,
        reward_terms=[{"score": reward} for reward in rewards],
        errors=errors,
        metrics={"success": float(score >= 1), "score": score},
        return_=float(sum(rewards)),
        success=score >= 1 and sample.error is None,
        stop_reason=_stop_reason(sample),
        error=None if sample.error is None else _plain(sample.error.message),
        attempts=[],
        usage=_usage(sample),
        labels={},
    )


def _turns(sample: Any) -> tuple[list[str], list[str | None]]:
    """Return what the model wrote in each turn, and the error of the tool it called."""
    actions: list[str] = []
    errors: list[str | None] = []
    for message in sample.messages:
        if message.role == "assistant" and message.source != "input":
            calls = [
                json.dumps({"name": call.function, "arguments": call.arguments})
                for call in message.tool_calls or ()
            ]
            actions.append("\n".join([*filter(None, [message.text]), *calls]))
            errors.append(None)
        elif message.role == "tool" and message.error is not None and errors:
            errors[-1] = str(message.error.type)
    return actions, errors


def _score(sample: Any) -> float:
    """Return the first score as a number; full marks are 1."""
    for score in (sample.scores or {}).values():
        value = score.value
        if isinstance(value, bool | int | float):
            return float(value)
        return float(value in _PASSES)
    return 0.0


def _stop_reason(sample: Any) -> StopReason:
    if sample.error is not None:
        return StopReason.ENVIRONMENT_ERROR
    if sample.limit is not None:
        return _LIMITS.get(sample.limit.type, StopReason.TURN_LIMIT)
    return StopReason.ANSWERED


def _usage(sample: Any) -> LineUsage:
    usages = list(sample.model_usage.values())
    money = [usage.total_cost for usage in usages]
    return LineUsage(
        calls=sum(message.role == "assistant" for message in sample.messages),
        prompt_tokens=sum(usage.input_tokens for usage in usages),
        completion_tokens=sum(usage.output_tokens for usage in usages),
        money=None if not money or None in money else float(sum(money)),
    )


def _task_hash(sample: Any) -> str:
    """Return a hash of what defines a task: its input and its target."""
    texts = (
        sample.input
        if isinstance(sample.input, str)
        else [[message.role, message.text] for message in sample.input]
    )
    content = json.dumps([texts, sample.target], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _plain(text: str) -> str:
    """Return text that JSON and UTF-8 can hold, without control characters."""
    return re.sub(r"[\x00-\x1f\ud800-\udfff]", " ", text)
