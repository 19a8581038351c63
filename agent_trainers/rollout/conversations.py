"""Conversations of others as demonstrations.

A row of a JSONL, JSON or Parquet file is one of:

``{"messages": [...]}``
    OpenAI's messages; every message of the role ``assistant`` is an action, what stands before it
    its state.
``{"prompt": [...], "completion": [...]}``
    TRL's columns: only what is in ``completion`` is an action.
``{"attempts": [{"messages": [...], "success": false}, ...]}``
    Trial and error at one task: each attempt is a conversation of its own.

Beside it may stand ``tools`` (function schemas), ``success`` (a boolean) or ``reward`` (a number;
above 0 is a success), and ``task_id``.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.policies.rendering import ChatRenderer, Schemas
from agent_trainers.rollout.demonstrations import Demonstration
from agent_trainers.trajectory import Trajectory

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_FORM: Final = (
    "A row needs 'messages', or 'prompt' and 'completion', or 'attempts', a list of rows with "
    "'messages'."
)


def read_conversations(
    path: str | Path, renderer: ChatRenderer, *, keep_failures: bool = False
) -> Iterator[Trajectory]:
    """Read conversations as trajectories; those without an action of the model are left out.

    Args:
        path: The file.
        renderer: Turns messages into tokens.
        keep_failures: Whether what is marked as a failure is kept, too.

    Raises:
        DataError: If a row is none of the forms above; names file, row and what is wrong.
    """
    for number, row in enumerate(read_records(path), start=1):
        try:
            for attempt in _attempts(row):
                if keep_failures or _is_success(attempt):
                    trajectory = _trajectory(attempt, str(row.get("task_id", number)), renderer)
                    if trajectory.transitions:
                        yield trajectory
        except (DataError, ConfigurationError) as error:
            raise DataError(f"{path}, row {number}: {error}") from None


def _attempts(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    attempts = row.get("attempts")
    if attempts is None:
        return [row]
    if not isinstance(attempts, list) or not all(isinstance(a, Mapping) for a in attempts):
        raise DataError(f"'attempts' must be a list of objects. {_FORM}")
    shared = {name: row[name] for name in ("tools",) if name in row}
    return [{**shared, **attempt} for attempt in attempts]


def _is_success(attempt: Mapping[str, Any]) -> bool:
    success, reward = attempt.get("success"), attempt.get("reward")
    if success is not None and not isinstance(success, bool):
        raise DataError(f"'success' must be true or false, not {success!r}.")
    if reward is not None and not isinstance(reward, int | float):
        raise DataError(f"'reward' must be a number, not {reward!r}.")
    return success if success is not None else reward is None or reward > 0


def _trajectory(attempt: Mapping[str, Any], task_id: str, renderer: ChatRenderer) -> Trajectory:
    if "messages" in attempt:
        context, told = [], _messages(attempt, "messages")
    elif "prompt" in attempt and "completion" in attempt:
        context, told = _messages(attempt, "prompt"), _messages(attempt, "completion")
    else:
        raise DataError(
            f"there is no conversation in it (found: {', '.join(attempt) or 'nothing'}). {_FORM}"
        )
    tools: Schemas = attempt.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise DataError("'tools' must be a list of function schemas.")
    demonstration = Demonstration(renderer, tools)
    messages = list(context)
    for message in told:
        if message["role"] == "assistant":
            if not messages:
                raise DataError("it begins with the model's turn; there is no state before it.")
            ids = (
                renderer.message_ids([*messages, message], tools)
                if message.get("tool_calls")
                else renderer.turn_ids(message["content"])
            )
            demonstration.add(messages, message["content"], ids)
        messages = [*messages, message]
    return demonstration.trajectory(task_id, {"success": float(_is_success(attempt))})


def _messages(attempt: Mapping[str, Any], name: str) -> list[Message]:
    given = attempt[name]
    if isinstance(given, str):
        given = [{"role": "user" if name == "prompt" else "assistant", "content": given}]
    if not isinstance(given, list) or not given:
        raise DataError(f"{name!r} must be a list of messages, not empty.")
    return [_message(message, f"message {i} of {name!r}") for i, message in enumerate(given, 1)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise DataError(f"{place} needs a 'role', one of {', '.join(_ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's parts
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{place} holds more than text, which is not supported.")
        content = "".join(map(str, texts))
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{place} needs a 'content', a text.")
    kept = {name: value for name, value in message.items() if value is not None}
    result: Message = {**kept, "content": content}  # type: ignore[typeddict-item]
    return result
