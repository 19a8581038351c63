"""Runs as logs of inspect_ai, which ``inspect view`` shows, and such logs as runs.

A log is one agent on one environment. Besides what the viewer shows, its metadata contain the rows
of the run: a run comes back from its logs unchanged, and verifies. Only logs that this module
wrote are read.
"""

import dataclasses
import datetime
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from agent_envs.core.lookup import require_extra
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.play.replay import ReplayedStep
from agent_leaderboard.records.manifest import FORMAT_VERSION, Manifest
from agent_leaderboard.records.reading import Record, parse_json, validated
from agent_leaderboard.records.results import (
    Cell,
    EpisodeResult,
    Run,
    TaskEntry,
    from_row,
    read_run,
    to_row,
    write_run,
)
from agent_leaderboard.report.board import counted, success_interval
from agent_leaderboard.report.transcripts import Transcript, make_transcripts
from agent_trainers.trajectory import StopReason

RECORD_KEY: Final = "agent_r1"
"""Metadata key of the rows, as JSON text."""
SUCCESS: Final = "success"
_FEATURE: Final = "Logs of inspect_ai"
_LIMITS: Final[Mapping[StopReason, str]] = {
    StopReason.TURN_LIMIT: "turn",
    StopReason.TOKEN_LIMIT: "token",
    StopReason.CONTEXT_OVERFLOW: "context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord(Record):
    """Manifest and task list of a log."""

    manifest: Manifest
    environment: str
    agent: str
    tasks: list[TaskEntry]


def export(folder: Path, logs: Path, data: Path | None = None) -> None:
    """Write a log for each agent on each environment, ``<environment>_<agent>.eval``.

    With the `data` folder, logs contain the text of licensed data sets: do not publish them.

    Raises:
        DataError: If the run folder cannot be read.
        MissingExtraError: If inspect_ai is not installed.
    """
    require_extra("inspect", _FEATURE, "inspect_ai")
    from inspect_ai.log import write_eval_log

    run = read_run(folder)
    logs.mkdir(parents=True, exist_ok=True)
    for cell in tqdm(run.results, desc="logs", unit="log"):
        with_text = run.manifest.environment(cell[0]).is_text_public or data is not None
        shown = list(make_transcripts(run, cell, data, with_text=with_text))
        write_eval_log(_log(run, cell, shown), str(logs / f"{cell[0]}_{cell[1]}.eval"))


def import_logs(logs: Sequence[Path], output: Path) -> None:
    """Make a run folder, new or empty, of log files or folders of them.

    Raises:
        ConfigurationError: If `output` is not empty, or there is no log.
        DataError: If a log cannot be read, or logs do not fit each other.
        MissingExtraError: If inspect_ai is not installed.
    """
    require_extra("inspect", _FEATURE, "inspect_ai")
    if output.exists() and any(output.iterdir()):
        raise ConfigurationError(f"{output}: is not empty. Name a new folder for the run.")
    paths = [path for given in logs for path in _log_files(given)]
    if not paths:
        raise ConfigurationError("There is no log: name .eval or .json files, or a folder.")
    manifest: Manifest | None = None
    tasks: dict[str, list[TaskEntry]] = {}
    results: dict[Cell, list[EpisodeResult]] = {}
    for path in tqdm(paths, desc="logs", unit="log"):
        record, own = _read(path)
        cell = record.environment, record.agent
        manifest = manifest or record.manifest
        if record.manifest != manifest or tasks.setdefault(cell[0], record.tasks) != record.tasks:
            raise DataError(f"{path}: is a log of another run than those before it.")
        if cell in results:
            raise DataError(f"{path}: another log has {cell[1]} on {cell[0]}.")
        results[cell] = own
    if manifest is None or {(e.slug, a.slug) for e, a in manifest.cells} != results.keys():
        raise DataError(f"{output}: logs of some agents or environments of the run are missing.")
    ordered = {environment.slug: tasks[environment.slug] for environment in manifest.environments}
    output.mkdir(parents=True, exist_ok=True)
    write_run(output, Run(manifest=manifest, tasks=ordered, results=results))


def _log_files(given: Path) -> list[Path]:
    if given.is_dir():
        return sorted(path for path in given.iterdir() if path.suffix in (".eval", ".json"))
    return [given]


def _read(path: Path) -> tuple[LogRecord, list[EpisodeResult]]:
    from inspect_ai.log import read_eval_log

    try:
        log = read_eval_log(str(path), resolve_attachments=True)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise DataError(
            f"{path}: is not a log of inspect_ai ({type(error).__name__}: {reason})."
        ) from None
    text = (log.eval.metadata or {}).get(RECORD_KEY)
    if text is None or not log.samples:
        raise DataError(f"{path}: was not written by `agent-r1-bench to-inspect`.")
    record: LogRecord = validated(LogRecord, parse_json(text, path), path)
    if record.manifest.format_version != FORMAT_VERSION:
        raise DataError(f"{path}: was written by another version of agent-r1.")
    results = []
    for sample in log.samples:
        place = f"{path}: sample {sample.id!r}, epoch {sample.epoch}"
        result = from_row(parse_json(str(sample.metadata.get(RECORD_KEY)), place), place)
        score = (sample.scores or {}).get(SUCCESS)
        if score is not None and bool(score.value) != result.success:
            raise DataError(
                f"{place}: the score is {score.value}, but the run has success {result.success}."
            )
        results.append(result)
    order = {entry.task: i for i, entry in enumerate(record.tasks)}
    if any(result.task not in order for result in results):
        raise DataError(f"{path}: has an episode of an unlisted task.")
    return record, sorted(results, key=lambda one: (order[one.task], one.sample))


# Writing


def _log(run: Run, cell: Cell, episodes: Sequence[Transcript]) -> Any:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec, EvalStats
    from inspect_ai.model import GenerateConfig

    manifest, tasks = run.manifest, list(run.tasks[cell[0]])
    environment, agent = manifest.environment(cell[0]), manifest.agent(cell[1])
    record = LogRecord(manifest=manifest, environment=cell[0], agent=cell[1], tasks=tasks)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    spec = EvalSpec(
        created=now,
        task=environment.slug,
        task_display_name=environment.id,
        task_args=environment.kwargs,
        solver=agent.kind,
        model=_model(agent.slug),
        model_generate_config=GenerateConfig(temperature=manifest.protocol.temperature),
        dataset=EvalDataset(
            name=environment.slug, samples=len(tasks), sample_ids=[entry.task_id for entry in tasks]
        ),
        config=EvalConfig(epochs=manifest.protocol.samples_per_task),
        packages=agent.packages,
        metadata={RECORD_KEY: json.dumps(dataclasses.asdict(record))},
    )
    return EvalLog(
        status="success",
        eval=spec,
        results=_results([episode.result for episode in episodes]),
        stats=EvalStats(started_at=now, completed_at=now),
        samples=[_sample(episode) for episode in episodes],
    )


def _model(agent: str) -> str:
    return f"agent-r1/{agent}"  # inspect_ai's form is provider/name


def _results(results: Sequence[EpisodeResult]) -> Any:
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    own = counted(results)
    metrics: dict[str, Any] = {}
    if interval := success_interval(own):
        values = {"mean": interval.mean, "low_95": interval.low, "high_95": interval.high}
        metrics = {name: EvalMetric(name=name, value=value) for name, value in values.items()}
    score = EvalScore(
        name=SUCCESS,
        scorer=SUCCESS,
        scored_samples=len(own),
        unscored_samples=len(results) - len(own),
        metrics=metrics,
    )
    return EvalResults(total_samples=len(results), completed_samples=len(own), scores=[score])


def _sample(episode: Transcript) -> Any:
    from inspect_ai.log import EvalError, EvalSample, EvalSampleLimit
    from inspect_ai.model import ModelOutput, ModelUsage
    from inspect_ai.scorer import Score

    result, text = episode.result, episode.text
    first = _first_messages(episode)
    usage = ModelUsage(
        input_tokens=result.prompt_tokens,
        output_tokens=result.completion_tokens,
        total_tokens=result.prompt_tokens + result.completion_tokens,
        total_cost=result.money,
    )
    limit, error = _LIMITS.get(result.stop_reason), result.error
    scores = {
        SUCCESS: Score(value=int(result.success), explanation="\n".join(episode.reasons) or None),
        "return": Score(value=result.return_),
        **{_encodable(k): Score(value=v) for k, v in result.metrics.items() if k != SUCCESS},
    }
    return EvalSample(
        id=episode.entry.task_id,
        epoch=result.sample + 1,
        input=first,
        target=[] if text is None else _encodable(text.answers),
        messages=[*first, *_step_messages(episode)],
        output=ModelOutput.from_content(
            _model(result.agent), _encodable(result.actions[-1]) if result.actions else ""
        ),
        scores=scores if error is None else None,
        metadata={**episode.entry.labels, RECORD_KEY: json.dumps(to_row(result))},
        model_usage={_model(result.agent): usage},
        total_time=result.seconds,
        error=error and EvalError(message=error, traceback=error, traceback_ansi=error),
        limit=None if limit is None else EvalSampleLimit(type=limit, limit=len(result.actions)),
    )


def _first_messages(episode: Transcript) -> list[Any]:
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser

    if episode.text is None:
        return [ChatMessageUser(content=f"({episode.note})")]
    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser}
    return [
        kinds[message["role"]](content=_encodable(message["content"]))
        for message in episode.text.messages
    ]


def _step_messages(episode: Transcript) -> Iterator[Any]:
    from inspect_ai.model import ChatMessageAssistant
    from inspect_ai.tool import ToolCall

    result = episode.result
    for number, action in enumerate(result.actions):
        step = None if episode.text is None else episode.text.steps[number]
        calls = None
        if step is not None and step.parsed.get("kind") == "tool_call":
            arguments = _encodable(step.parsed["arguments"])
            name = step.parsed["name"]
            calls = [ToolCall(id=f"call_{number}", function=name, arguments=arguments)]
        yield ChatMessageAssistant(
            content=_encodable(action if step is None else step.action),
            metadata={
                "reward": result.rewards[number],
                "reward_terms": result.reward_terms[number],
                "error": result.errors[number],
            },
            tool_calls=calls,
        )
        if step is not None and step.observation:
            yield _observation(step, number)


def _observation(step: ReplayedStep, number: int) -> Any:
    from inspect_ai.model import ChatMessageTool, ChatMessageUser
    from inspect_ai.tool import ToolCallError

    content = _encodable(step.observation)
    if step.parsed.get("kind") != "tool_call":
        return ChatMessageUser(content=content)
    kind = "timeout" if step.error == "tool_timeout" else "unknown"
    return ChatMessageTool(
        content=content,
        tool_call_id=f"call_{number}",
        function=step.parsed["name"],
        error=None if step.error is None else ToolCallError(type=kind, message=content),
    )


def _encodable(value: Any) -> Any:
    """Return text, or nested JSON, with lone surrogates escaped for UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return list(map(_encodable, value)) if isinstance(value, list | tuple) else value
