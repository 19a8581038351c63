"""Fixed task lists, with a hash of each task's content."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from agent_envs.core.tasks import Task
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import MakeEnv, tool_env
from agent_leaderboard.play.environments import (
    data_files,
    data_path,
    environment_seal,
    reads_data,
)
from agent_leaderboard.records.manifest import DataFile, EnvironmentRecord
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import Labels, TaskEntry, task_list_sha256
from agent_leaderboard.records.sealing import Seal


def complete_record(
    record: EnvironmentRecord, make_env: MakeEnv, *, count: int, seed: int, data: Path | None
) -> tuple[EnvironmentRecord, list[TaskEntry]]:
    """Return a record with what the environment itself says, and its list of `count` tasks."""
    files = [
        DataFile(name=name, sha256=file_sha256(data_path(name, data)))
        for name in data_files(record, data)
    ]
    record = dataclasses.replace(record, data=files, is_text_public=not reads_data(record))
    try:
        made = make_env()
    except TypeError as error:  # an unknown argument
        raise ConfigurationError(f"An environment could not be made: {error}.") from None
    with closing(made):
        env, seal = tool_env(made), environment_seal(record, data)
        entries = list_tasks(env, draw_tasks(env, count, seed), seal)
        return dataclasses.replace(
            record,
            max_turns=None if made.spec is None else made.spec.max_episode_steps,
            reward_terms=dict(env.reward_weights),
            outcome_terms=sorted(env.outcome_terms & env.reward_weights.keys()),
            num_tasks=len(entries),
            tasks_sha256=task_list_sha256(entries),
        ), entries


def draw_tasks(env: ToolEnv, count: int, seed: int) -> list[int]:
    """Return the task indices of a run: drawn by `seed`, or the first of a generated family."""
    if env.num_tasks is None:
        return list(range(count))
    if count >= env.num_tasks:
        return list(range(env.num_tasks))
    chosen = np.random.default_rng(seed).choice(env.num_tasks, count, replace=False)
    return sorted(int(task) for task in chosen)


def list_tasks(env: ToolEnv, indices: Sequence[int], seal: Seal) -> list[TaskEntry]:
    """Return the task list of these indices, with hashes keyed by the environment's seal."""
    entries = []
    for index in indices:
        env.reset(seed=0, options={"task": index})
        entries.append(task_entry(index, env.task, seal))
    return entries


def task_entry(index: int, task: Task, seal: Seal) -> TaskEntry:
    """Return the entry of a task."""
    sha256, labels = task_sha256(task, seal), task_labels(task)
    return TaskEntry(task=index, task_id=task.id, sha256=sha256, labels=labels)


def task_sha256(task: Task, seal: Seal) -> str:
    """Return a hash of a task's content: id, question, answers and data."""
    content = [task.id, task.question, list(task.answers), _plain(task.data)]
    return seal.digest(json.dumps(content, sort_keys=True))  # ASCII: lone surrogates are allowed


def task_labels(task: Task) -> Labels:
    """Return the labels of a task as far as it has them."""
    data = task.data
    kind = data.get("type") or data.get("subject") or getattr(data.get("task"), "kind", None)
    texts = {"type": kind, "level": data.get("level")}
    labels: Labels = {name: str(text) for name, text in texts.items() if text is not None}
    if questions := data.get("questions"):
        labels["hops"] = len(questions[0].gold)
    elif facts := data.get("gold") or data.get("steps"):  # that lead to the answer, or calls
        labels["hops"] = len(facts)
    return labels


def _plain(value: Any) -> Any:
    """Convert nested values to JSON that is equal for equal content."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
