"""Demonstrations: reference episodes, recorded trajectories and conversations, tokenised for SFT.

States and actions go through the same renderer as in reinforcement learning, so supervised training
sees the tokens and masks that are sampled and trained later.

A row of a conversation file (JSONL, JSON or Parquet) has OpenAI's ``messages``, where every message
of the role ``assistant`` is an action and the messages before it are its state, or TRL's ``prompt``
and ``completion``, where only those of the completion are actions. Optional fields: ``tools``
(function schemas), ``success`` (a boolean) and ``task_id``.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, StrictBool, ValidationError

from agent_envs.core.command_line import refusal
from agent_envs.core.messages import Message
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.policies.policy import Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import MakeEnv, template_tools
from agent_trainers.trajectory import StopReason, Trajectory, Transition

_MESSAGE: Final = "demonstrated_message"


class _Turn(BaseModel, extra="allow"):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Row(BaseModel):
    messages: list[_Turn] = []
    prompt: list[_Turn] = []
    completion: list[_Turn] = []
    tools: list[dict[str, Any]] | None = None
    success: StrictBool = True
    task_id: str | int | None = None


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
            tools = template_tools(info)
            steps: list[Transition] = []
            for action in reference():
                state = info["messages"]
                _, reward, terminated, truncated, info = env.step(action)
                steps.append(
                    _step(
                        state,
                        action,
                        reward=float(reward),
                        reward_terms=info.get("reward_terms", {}),
                        terminated=terminated,
                        truncated=truncated,
                    )
                )
                if terminated or truncated:
                    break
            task_id = str(info.get("task_id", task))
            yield retell(_episode(task_id, steps, info.get("metrics", {})), renderer, tools)
    finally:
        env.close()


def retell(trajectory: Trajectory, renderer: ChatRenderer, tools: Schemas) -> Trajectory:
    """Return a trajectory in the tokens of another model, without `info`; rewards stay."""
    steps: list[Transition] = []
    for t in trajectory.transitions:
        ids = renderer.turn_ids(t.action)
        if (message := t.info.get(_MESSAGE, {})).get("tool_calls"):
            ids = renderer.message_ids([*t.messages, message], tools)
        steps.append(
            dataclasses.replace(
                t,
                prompt_ids=renderer.prompt_ids(t.messages, tools, steps[-1] if steps else None),
                completion_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                info={},
            )
        )
    return _episode(trajectory.task_id, steps, trajectory.metrics)


def _step(messages: Sequence[Message], action: str, **changes: Any) -> Transition:
    """Return a step without tokens."""
    defaults = {"reward": 0.0, "reward_terms": {}, "terminated": False, "truncated": False}
    return Transition(
        messages=list(messages),
        prompt_ids=[],
        completion_ids=[],
        logprobs=np.zeros(0, np.float32),
        action=action,
        **{**defaults, "info": {}, **changes},
    )


def _episode(task_id: str, steps: list[Transition], metrics: Mapping[str, float]) -> Trajectory:
    return Trajectory(
        task_id=task_id,
        group_id=task_id,
        transitions=steps,
        metrics=dict(metrics),
        timings={},
        stop_reason=StopReason.ANSWERED,
    )


def read_conversations(path: str | Path, renderer: ChatRenderer) -> Iterator[Trajectory]:
    """Read a file of conversations as trajectories; those without an assistant turn are skipped.

    Raises:
        DataError: If a row has none of the forms above; names file, row and field.
    """
    for number, record in enumerate(read_records(path), start=1):
        place = f"{path}, row {number}"
        try:  # a missing value is None in Parquet
            row = _Row.model_validate({k: v for k, v in record.items() if v is not None})
            episode = _conversation(row, str(number if row.task_id is None else row.task_id))
            trajectory = retell(episode, renderer, row.tools)
        except ValidationError as error:
            raise DataError(str(refusal(place, error))) from None
        except (DataError, ConfigurationError) as error:
            raise DataError(f"{place}: {error}") from None
        if trajectory.transitions:
            yield trajectory


def _conversation(row: _Row, task_id: str) -> Trajectory:
    """Return a conversation without tokens."""
    if not (row.messages or row.completion):
        raise DataError("a row needs 'messages', or 'prompt' and 'completion'.")
    messages = [_message(turn) for turn in row.prompt]
    steps = []
    for message in map(_message, row.messages or row.completion):
        if message["role"] == "assistant":
            if not messages:
                raise DataError("it begins with an assistant turn, which has no state before it.")
            steps.append(_step(messages, message["content"], info={_MESSAGE: message}))
        messages.append(message)
    return _episode(task_id, steps, {"success": float(row.success)})


def _message(turn: _Turn) -> Any:
    if turn.content is None and not turn.tool_calls:
        raise DataError(f"a message of the role {turn.role!r} needs a 'content'.")
    return {"content": "", **turn.model_dump(exclude_none=True)}
