"""Demonstrations: reference episodes, recorded trajectories and conversations, tokenised for SFT.

States and actions go through the same renderer as in reinforcement learning, so supervised training
sees the tokens and masks that are sampled and trained later.

A row of a conversation file (JSONL, JSON or Parquet) is one of:

``{"messages": [...]}``
    OpenAI's messages; every message of the role ``assistant`` is an action, the messages before it
    its state.
``{"prompt": [...], "completion": [...]}``
    TRL's columns: only assistant messages of ``completion`` are actions.
``{"attempts": [{"messages": [...], "success": false}, ...]}``
    Several attempts at one task: each is a separate conversation.

Optional fields: ``tools`` (function schemas), ``success`` (a boolean) or ``reward`` (a number,
where above 0 is a success), and ``task_id``.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.policies.policy import Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import MakeEnv, template_tools
from agent_trainers.trajectory import StopReason, Trajectory, Transition

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_FORM: Final = (
    "A row needs 'messages', or 'prompt' and 'completion', or 'attempts', a list of rows with "
    "'messages'."
)


class Demonstration:
    """Builds a trajectory step by step."""

    def __init__(self, renderer: ChatRenderer, tools: Schemas) -> None:
        """Start without steps; `tools` are those that the chat template describes."""
        self._renderer, self._tools = renderer, tools
        self._transitions: list[Transition] = []

    def add(
        self, messages: Sequence[Message], action: str, completion_ids: list[int], **outcome: Any
    ) -> None:
        """Append a step: its state, its action and its tokens; `outcome` sets other fields."""
        previous = self._transitions[-1] if self._transitions else None
        defaults = {"reward": 0.0, "reward_terms": {}, "terminated": False, "truncated": False}
        self._transitions.append(
            Transition(
                messages=list(messages),
                prompt_ids=self._renderer.prompt_ids(messages, self._tools, previous),
                completion_ids=completion_ids,
                logprobs=np.zeros(len(completion_ids), np.float32),
                action=action,
                **{**defaults, "info": {}, **outcome},
            )
        )

    def trajectory(self, task_id: str, metrics: Mapping[str, float]) -> Trajectory:
        """Return the trajectory."""
        return Trajectory(
            task_id=task_id,
            group_id=task_id,
            transitions=self._transitions,
            metrics=dict(metrics),
            timings={},
            stop_reason=StopReason.ANSWERED,
        )


def play_reference(
    make_env: MakeEnv, renderer: ChatRenderer, tasks: Sequence[int]
) -> Iterator[Trajectory]:
    """Solve each task by the environment's ``reference_actions()``.

    Raises:
        ConfigurationError: If the environment has none.
    """
    env = make_env()
    try:
        reference = getattr(env.unwrapped, "reference_actions", None)
        if reference is None:
            raise ConfigurationError(
                "The environment has no reference_actions() to demonstrate its tasks with. Add "
                "that method, or use recorded trajectories."
            )
        for task in tasks:
            _, info = env.reset(seed=task, options={"task": task})
            demonstration = Demonstration(renderer, template_tools(info))
            for action in reference():
                state = info["messages"]
                _, reward, terminated, truncated, info = env.step(action)
                demonstration.add(
                    state,
                    action,
                    renderer.turn_ids(action),
                    reward=float(reward),
                    reward_terms=info.get("reward_terms", {}),
                    terminated=terminated,
                    truncated=truncated,
                )
                if terminated or truncated:
                    break
            yield demonstration.trajectory(str(info.get("task_id", task)), info.get("metrics", {}))
    finally:
        env.close()


def retell(trajectory: Trajectory, renderer: ChatRenderer, tools: Schemas) -> Trajectory:
    """Return a recorded trajectory in the tokens of another model; rewards stay."""
    demonstration = Demonstration(renderer, tools)
    for t in trajectory.transitions:
        demonstration.add(
            t.messages,
            t.action,
            renderer.turn_ids(t.action),
            reward=t.reward,
            reward_terms=t.reward_terms,
            terminated=t.terminated,
            truncated=t.truncated,
        )
    return demonstration.trajectory(trajectory.task_id, trajectory.metrics)


def read_conversations(
    path: str | Path, renderer: ChatRenderer, *, keep_failures: bool = False
) -> Iterator[Trajectory]:
    """Read conversations as trajectories; those without an assistant turn are skipped.

    Args:
        path: The file.
        renderer: Turns messages into tokens.
        keep_failures: Whether attempts marked as failures are kept.

    Raises:
        DataError: If a row has none of the forms above; names file, row and field.
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
        context, new = [], _messages(attempt, "messages")
    elif "prompt" in attempt and "completion" in attempt:
        context, new = _messages(attempt, "prompt"), _messages(attempt, "completion")
    else:
        raise DataError(
            f"it holds no conversation (found: {', '.join(attempt) or 'nothing'}). {_FORM}"
        )
    tools: Schemas = attempt.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise DataError("'tools' must be a list of function schemas.")
    demonstration = Demonstration(renderer, tools)
    messages = list(context)
    for message in new:
        if message["role"] == "assistant":
            if not messages:
                raise DataError("it begins with an assistant turn, which has no state before it.")
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
        raise DataError(f"{name!r} must be a non-empty list of messages.")
    return [_message(message, f"message {i} of {name!r}") for i, message in enumerate(given, 1)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise DataError(f"{place} needs a 'role', one of {', '.join(_ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's parts
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{place} has a part that is not text, which is not supported.")
        content = "".join(map(str, texts))
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{place} needs a 'content', a string.")
    kept = {name: value for name, value in message.items() if value is not None}
    result: Message = {**kept, "content": content}  # type: ignore[typeddict-item]
    return result
