"""One agent on one environment as a log of inspect_ai, made of inspect_ai's own types."""

import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent_leaderboard.play.replay import ReplayedStep
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    LeftOut,
    Manifest,
    Protocol,
)
from agent_leaderboard.records.reading import Record
from agent_leaderboard.records.results import ResultLine, TaskEntry, line_record, write_line
from agent_leaderboard.report.episodes import EpisodeView
from agent_leaderboard.report.summary import counted, success_interval
from agent_trainers.trajectory import StopReason

RECORD_KEY: Final = "agent_r1"
"""Where the metadata of a log and of its samples hold what the run folder holds, as JSON text."""
SUCCESS: Final = "success"
_LIMITS: Final[Mapping[StopReason, str]] = {
    StopReason.TURN_LIMIT: "turn",
    StopReason.TOKEN_LIMIT: "token",
    StopReason.CONTEXT_OVERFLOW: "context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord(Record):
    """What a run's folder says of one agent on one environment, besides the result lines."""

    protocol: Protocol
    environment: EnvironmentRecord
    agent: AgentRecord
    tasks: list[TaskEntry]
    left_out: list[LeftOut] = field(default_factory=list)
    position: tuple[int, int] = (0, 0)
    """Where environment and agent stand in the manifest, so that a run comes back in its order."""


def make_log(
    manifest: Manifest,
    cell: tuple[str, str],
    tasks: list[TaskEntry],
    episodes: Sequence[EpisodeView],
) -> Any:
    """Make the ``EvalLog`` of one agent on one environment."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec, EvalStats
    from inspect_ai.model import GenerateConfig

    environment, agent = manifest.environment(cell[0]), manifest.agent(cell[1])
    record = LogRecord(
        protocol=manifest.protocol,
        environment=environment,
        agent=agent,
        tasks=tasks,
        left_out=manifest.left_out,
        position=(manifest.environments.index(environment), manifest.agents.index(agent)),
    )
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
            name=environment.slug,
            samples=len(tasks),
            sample_ids=[entry.task_id for entry in tasks],
        ),
        config=EvalConfig(epochs=manifest.protocol.samples_per_task),
        packages=agent.packages,
        metadata={RECORD_KEY: json.dumps(dataclasses.asdict(record))},
    )
    return EvalLog(
        status="success",
        eval=spec,
        results=_results(cell, [episode.line for episode in episodes]),
        stats=EvalStats(started_at=now, completed_at=now),
        samples=[_sample(episode) for episode in episodes],
    )


def _model(agent: str) -> str:
    return f"agent-r1/{agent}"  # inspect_ai writes models as provider/name


def _results(cell: tuple[str, str], lines: Sequence[ResultLine]) -> Any:
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    own = counted(lines)
    metrics: dict[str, Any] = {}
    if interval := success_interval(own):
        values = {"mean": interval.mean, "low_95": interval.low, "high_95": interval.high}
        metrics = {name: EvalMetric(name=name, value=value) for name, value in values.items()}
    score = EvalScore(
        name=SUCCESS,
        scorer=SUCCESS,
        scored_samples=len(own),
        unscored_samples=len(lines) - len(own),
        metrics=metrics,
    )
    return EvalResults(total_samples=len(lines), completed_samples=len(own), scores=[score])


def _sample(episode: EpisodeView) -> Any:
    from inspect_ai.log import EvalError, EvalSample, EvalSampleLimit
    from inspect_ai.model import ModelOutput, ModelUsage

    line, text = episode.line, episode.text
    messages = _first_messages(episode)
    usage = ModelUsage(
        input_tokens=line.usage.prompt_tokens,
        output_tokens=line.usage.completion_tokens,
        total_tokens=line.usage.prompt_tokens + line.usage.completion_tokens,
        total_cost=line.usage.money,
    )
    limit = _LIMITS.get(line.stop_reason)
    error = _encodable(line.error)
    return EvalSample(
        id=line.task_id,
        epoch=line.sample + 1,
        input=messages,
        target=[] if text is None else _encodable(text.answers),
        messages=[*messages, *_step_messages(episode)],
        output=ModelOutput.from_content(
            _model(line.agent), _encodable(line.actions[-1]) if line.actions else ""
        ),
        scores=_scores(episode) if error is None else None,
        metadata={**line.labels, "seed": line.seed, RECORD_KEY: write_line(line_record(line))},
        model_usage={_model(line.agent): usage},
        total_time=episode.seconds,
        error=error and EvalError(message=error, traceback=error, traceback_ansi=error),
        limit=None if limit is None else EvalSampleLimit(type=limit, limit=len(line.actions)),
    )


def _scores(episode: EpisodeView) -> dict[str, Any]:
    from inspect_ai.scorer import Score

    line = episode.line
    metrics = {name: value for name, value in line.metrics.items() if name != SUCCESS}
    return {
        SUCCESS: Score(value=int(line.success), explanation="\n".join(episode.why) or None),
        "return": Score(value=line.return_),
        **{_encodable(name): Score(value=value) for name, value in metrics.items()},
    }


def _first_messages(episode: EpisodeView) -> list[Any]:
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser

    if episode.text is None:
        return [ChatMessageUser(content=f"({episode.note})")]
    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser}
    return [
        kinds[message["role"]](content=_encodable(message["content"]))
        for message in episode.text.messages
    ]


def _step_messages(episode: EpisodeView) -> Iterator[Any]:
    from inspect_ai.model import ChatMessageAssistant

    line = episode.line
    for number, action in enumerate(line.actions):
        step = None if episode.text is None else episode.text.steps[number]
        facts = {
            "reward": line.rewards[number],
            "reward_terms": line.reward_terms[number],
            "error": line.errors[number],
        }
        yield ChatMessageAssistant(
            content=_encodable(action if step is None else step.action),
            metadata=facts,
            tool_calls=None if step is None else _tool_calls(step, number),
        )
        if step is not None and step.observation:
            yield _observation(step, number)


def _tool_calls(step: ReplayedStep, number: int) -> list[Any] | None:
    from inspect_ai.tool import ToolCall

    if step.understood.get("kind") != "tool_call":
        return None
    arguments = _encodable(step.understood["arguments"])
    return [ToolCall(id=f"call_{number}", function=step.understood["name"], arguments=arguments)]


def _observation(step: ReplayedStep, number: int) -> Any:
    from inspect_ai.model import ChatMessageTool, ChatMessageUser
    from inspect_ai.tool import ToolCallError

    content = _encodable(step.observation)
    if step.understood.get("kind") != "tool_call":
        return ChatMessageUser(content=content)
    kind = "timeout" if step.error == "tool_timeout" else "unknown"
    return ChatMessageTool(
        content=content,
        tool_call_id=f"call_{number}",
        function=step.understood["name"],
        error=None if step.error is None else ToolCallError(type=kind, message=content),
    )


def _encodable(value: Any) -> Any:
    """Return text, or nested JSON, that UTF-8 can hold: lone surrogates are written out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return list(map(_encodable, value)) if isinstance(value, list | tuple) else value
