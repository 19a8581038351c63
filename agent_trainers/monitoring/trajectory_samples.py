"""Trajectories worth looking at, with what training made of them; and their way to Parquet."""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agent_envs.core.messages import Message
from agent_envs.data.files import atomic_path
from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.batch_record import BatchRecord, StepTokens, step_tokens
from agent_trainers.trajectory import Trajectory, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A remark on a trajectory, such as a sign of reward hacking."""

    sign: str
    """Its name."""
    step: int | None
    """The step, from 0; None for the whole episode."""
    seen: str
    """The observation, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySample:
    """A trajectory worth showing."""

    label: str
    """Where it comes from: ``training, step 1``."""
    trajectory: Trajectory
    """What was played."""
    optimiser_step: int
    """The optimiser step it was played for."""
    steps: Sequence[StepTokens] | None = None
    """How its steps were trained, shape (S,); None where nothing was trained on it."""
    rows: Sequence[Row] = ()
    """Its training rows; none where nothing was trained on it."""
    marks: Sequence[Mark] = ()
    """Signs of reward hacking in it."""
    diagnosis: Any = None
    """Which step lost it, where that was looked into."""


class StateChange(NamedTuple):
    """How a state differs from the one before it and the action taken there."""

    added: list[Message]
    """What is new: what the environment said, or all of it in a first state."""
    dropped: list[Message]
    """What is gone, or was replaced by something shorter."""


def choose(trajectories: Sequence[Trajectory], count: int) -> list[int]:
    """Return the numbers of at most `count` trajectories: failures and successes in turn.

    One of each group comes before a second of any.
    """
    seen: Counter[str] = Counter()
    by_outcome: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for i, trajectory in enumerate(trajectories):
        seen[trajectory.group_id] += 1
        by_outcome[trajectory.success].append((seen[trajectory.group_id], i))
    queues = [sorted(entries) for entries in by_outcome.values()]
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        chosen += [queue.pop(0)[1] for queue in queues if queue]
    return chosen[:count]


def trained_samples(
    record: BatchRecord,
    chosen: Sequence[int],
    *,
    label: str,
    optimiser_step: int,
    new_logprobs: npt.NDArray[Any] | None = None,
    find_marks: Callable[[Trajectory], Sequence[Mark]] = lambda _: (),
) -> list[TrajectorySample]:
    """Return the trajectories of a training batch that have the numbers `chosen`, as samples.

    `new_logprobs`, (B, T), are of the policy to compare with; see `step_tokens`.
    """
    samples = []
    for i in chosen:
        played = record.trajectories[i]
        # One that cannot be scored, or is a branch that only measures, has none.
        rows = [row for row in record.rows if row.episode == i]
        samples.append(
            TrajectorySample(
                label=f"{label}, {played.env}" if played.env else label,
                trajectory=played,
                optimiser_step=optimiser_step,
                steps=step_tokens(record, i, new_logprobs) if rows else None,
                rows=rows,
                marks=find_marks(played),
            )
        )
    return samples


def state_change(trajectory: Trajectory, step: int) -> StateChange:
    """Return what the state of `step` added to, and dropped from, all that was said before it."""
    after: list[Message] = list(trajectory.transitions[step].messages)
    if step == 0:
        return StateChange(added=after, dropped=[])
    previous = trajectory.transitions[step - 1]
    before = [*previous.messages, _action_message(previous, after)]
    # What follows the model's last message is new, even if something like it was said before.
    roles = [message["role"] for message in after]
    num_new = roles[::-1].index("assistant") if "assistant" in roles else 0
    kept, new = after[: len(after) - num_new], after[len(after) - num_new :]
    matcher = difflib.SequenceMatcher(None, [*map(_key, before)], [*map(_key, kept)], False)
    added: list[Message] = []
    dropped: list[Message] = []
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            dropped += before[i:j]
            added += kept[k:m]
    return StateChange(added=[*added, *new], dropped=dropped)


def _action_message(previous: Transition, after: Sequence[Message]) -> Message:
    """Return the action as the next state holds it; formats with native calls hold it in parts."""
    at = len(previous.messages)
    extends = len(after) > at and list(after[:at]) == previous.messages
    if extends and after[at]["role"] == "assistant":
        return after[at]
    return Message(role="assistant", content=previous.action)


def _key(message: Message) -> str:
    return json.dumps(message, sort_keys=True, default=str)


# Text goes to Parquet as UTF-8, which has no lone surrogates: those become question marks.
_TEXT: Final = ("task_id", "group_id", "stop_reason", "fork_reason", "context", "error_code",
                "added", "dropped", "action", "tool_result", "reward_terms", "metrics",
                "error", "signs")  # fmt: skip
_INTEGERS: Final = ("optimiser_step", "sample", "turn", "row", "prompt_tokens")
_REALS: Final = ("reward", "return", "seconds")
_TOKEN_REALS: Final = ("logprobs", "advantages", "values", "ratios")


def save_samples(path: str | Path, samples: Iterable[TrajectorySample], tokenizer: Any) -> None:
    """Write samples as Parquet, one row per environment step; whole or not at all.

    Columns: ``optimiser_step``, ``sample``, ``turn`` (from 1), ``task_id``, ``group_id``; ``added``
    and ``dropped``, how the state changed, ``action``, ``tool_result``; ``reward``,
    ``reward_terms`` (JSON), ``return``, ``success``, ``metrics`` (JSON), ``stop_reason``,
    ``error``; ``error_code``, ``context`` and ``signs`` (of reward hacking) of the step; ``row``,
    ``fork_reason``, ``prompt_tokens``, ``seconds``; and per token of the action ``tokens``,
    ``token_ids``, ``logprobs``, ``is_trained``, ``advantages``, ``values``, ``ratios``. Null
    is what was not measured or not trained.
    """
    import pyarrow as pa
    import pyarrow.parquet

    fields = {
        **dict.fromkeys(_INTEGERS, pa.int64()),
        **dict.fromkeys(_TEXT, pa.string()),
        **dict.fromkeys(_REALS, pa.float64()),
        "success": pa.bool_(),
        "tokens": pa.list_(pa.string()),
        "token_ids": pa.list_(pa.int64()),
        "is_trained": pa.list_(pa.bool_()),
        **dict.fromkeys(_TOKEN_REALS, pa.list_(pa.float32())),
    }
    records = [
        _record(sample, number, turn, tokenizer)
        for number, sample in enumerate(samples)
        for turn in range(len(sample.trajectory.transitions))
    ]
    table = pa.Table.from_pylist(records, schema=pa.schema(list(fields.items())))
    with atomic_path(path) as temporary:
        pyarrow.parquet.write_table(table, temporary)


def _record(sample: TrajectorySample, number: int, turn: int, tokenizer: Any) -> dict[str, Any]:
    trajectory = sample.trajectory
    transition = trajectory.transitions[turn]
    change = state_change(trajectory, turn)
    action = transition.info.get("action") or {}
    record = {
        "optimiser_step": sample.optimiser_step,
        "sample": number,
        "turn": turn + 1,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "added": _as_text(change.added),
        "dropped": _as_text(change.dropped),
        "action": transition.action,
        "tool_result": transition.info.get("tool_result"),
        "reward": transition.reward,
        "reward_terms": json.dumps(transition.reward_terms, default=float),
        "return": trajectory.return_,
        "success": trajectory.success,
        "metrics": json.dumps(trajectory.metrics, default=float),
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "error_code": action.get("error"),
        "signs": _as_words(mark.sign for mark in sample.marks if mark.step in (turn, None)),
        "context": (transition.info.get("context") or {}).get("reason"),
        "prompt_tokens": len(transition.prompt_ids),
        "seconds": dict(enumerate(trajectory.step_seconds)).get(turn),
        "tokens": [_clean(tokenizer.decode([token])) for token in transition.completion_ids],
        "token_ids": transition.completion_ids,
        "logprobs": np.asarray(transition.logprobs, np.float32).tolist(),
    }
    if sample.steps is not None:
        record |= dataclasses.asdict(sample.steps[turn])
    return {
        name: _clean(value) if name in _TEXT and value is not None else value
        for name, value in record.items()
    }


def _as_text(messages: Sequence[Message]) -> str | None:
    if not messages:
        return None
    return "\n".join(f"[{message['role']}] {message.get('content', '')}" for message in messages)


def _as_words(names: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(names)) or None


def _clean(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode("utf-8")
