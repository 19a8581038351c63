"""Preparing a run: its manifest and its task lists, with a hash of each task's content."""

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm.auto import tqdm

from agent_envs.core.tasks import Task
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError, MissingExtraError, SandboxUnavailableError
from agent_leaderboard.agents.agent import MakeEnv, find_kind, tool_env
from agent_leaderboard.play.config import DEFAULT_TASKS, RunConfig
from agent_leaderboard.play.environments import (
    check_data,
    configured_environment,
    data_files,
    data_path,
    environment_seal,
    reads_data,
)
from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    HIDDEN_SEEDS,
    AgentRecord,
    DataFile,
    EnvironmentRecord,
    LeftOut,
    Manifest,
    Protocol,
    published,
)
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import Labels, TaskEntry, task_list_sha256
from agent_leaderboard.records.sealing import Seal
from agent_trainers import TINY_POLICY, small_models

PACKAGES: Final = ("agent-r1", "gymnasium", "numpy")
MODEL_PACKAGES: Final = ("torch", "transformers")
LOCAL_SETTINGS: Final = ("model", "base_url", "api_key_env")
"""Settings that are not in the manifest; the model has its own field."""
EMBEDDED: Final = "embedded"
"""Name of the model that comes with the package."""


def prepare(config: RunConfig, data: Path | None) -> tuple[Manifest, dict[str, list[TaskEntry]]]:
    """Return the manifest, and the task list of each environment."""
    environments, left_out = [], list(config.left_out)
    tasks: dict[str, list[TaskEntry]] = {}
    for environment in tqdm(config.environments, desc="listing tasks", leave=False, disable=None):
        try:
            check_data(environment, data)
            record, entries = complete_record(
                environment,
                configured_environment(environment, None, data),
                count=environment.num_tasks,
                seed=config.protocol.seed,
                data=data,
            )
        except (MissingExtraError, SandboxUnavailableError) as error:
            if environment.slug not in config.optional:
                raise
            left_out.append(LeftOut(id=environment.id, reason=str(error)))
            continue
        if not entries:
            reason = "the hidden split has no tasks: the published run draws all of them"
            left_out.append(LeftOut(id=environment.id, reason=reason))
            continue
        environments.append(record)
        tasks[environment.slug] = entries
    if not environments:
        reasons = "; ".join(f"{one.id}: {one.reason}" for one in left_out[len(config.left_out) :])
        raise ConfigurationError(f"No environment of the run is available: {reasons}.")
    agents = [
        dataclasses.replace(agent, not_played=[slug for slug in agent.not_played if slug in tasks])
        for agent in config.agents
    ]
    agents = [_complete(agent) for agent in agents if len(agent.not_played) < len(tasks)]
    if not agents:
        raise ConfigurationError("No agent of the run plays in these environments. Choose others.")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        protocol=config.protocol,
        environments=environments,
        agents=agents,
        left_out=left_out,
    )
    return manifest, tasks


def _complete(agent: AgentRecord) -> AgentRecord:
    """Return the record of a configured agent, with what identifies its model and its code."""
    kind, model = find_kind(agent.kind), find_model(agent)
    packages = PACKAGES + (MODEL_PACKAGES if kind.needs_model else ())
    folder = Path(model) if model is not None and Path(model).is_dir() else None
    weights = sorted(folder.glob("*.safetensors")) if folder else []
    return dataclasses.replace(
        agent,
        model=agent.model or (folder.name if folder else model),
        weights_sha256={path.name: file_sha256(path) for path in weights},
        tool_format=agent.settings.get("tool_format", kind.tool_format),
        settings=recorded_settings(agent),
        date=datetime.now(UTC).date().isoformat(),
        commit=_commit(),
        packages={"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    )


def _commit() -> str | None:
    """Return the commit of the checkout that this package is in, if it is in one."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        for command in (
            [*git, "ls-files", "--error-unmatch", here.name],
            [*git, "rev-parse", "HEAD"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def complete_settings(agent: AgentRecord, protocol: Protocol, model: str | None) -> dict[str, Any]:
    """Return an agent's settings with the protocol's defaults and the model, if it has one."""
    if not find_kind(agent.kind).needs_model:
        return dict(agent.settings) if model is None else {**agent.settings, "model": model}
    defaults = {"temperature": protocol.temperature, "concurrency": protocol.concurrency}
    return {**defaults, **agent.settings, **({} if model is None else {"model": model})}


def recorded_settings(agent: AgentRecord) -> dict[str, Any]:
    """Return an agent's settings without `LOCAL_SETTINGS`."""
    return {k: v for k, v in agent.settings.items() if k not in LOCAL_SETTINGS}


def find_model(agent: AgentRecord) -> str | None:
    """Return the folder or name of a configured agent's model, or None.

    One of `SMALL_MODELS` is downloaded.
    """
    model: str | None = agent.settings.get("model")
    is_small = model in small_models.SMALL_MODELS and find_kind(agent.kind).needs_model
    if model is not None and is_small:
        return str(small_models.prepare(model))
    return str(TINY_POLICY) if model == EMBEDDED else model


# Task lists


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
        public = [one.num_tasks for one in published().environments if one.id == record.id]
        tasks = draw_tasks(env, count, seed, max(public, default=DEFAULT_TASKS))
        entries = list_tasks(env, tasks, seal)
        return dataclasses.replace(
            record,
            max_turns=None if made.spec is None else made.spec.max_episode_steps,
            reward_terms=dict(env.reward_weights),
            outcome_terms=sorted(env.outcome_terms & env.reward_weights.keys()),
            num_tasks=len(entries),
            tasks_sha256=task_list_sha256(entries),
        ), entries


def draw_tasks(env: ToolEnv, count: int, seed: int, num_public: int = DEFAULT_TASKS) -> list[int]:
    """Return the task indices of a run: drawn by `seed`, or the first of a generated family.

    Seeds of a hidden split draw the latter, too, from more tasks than a table could hold, and none
    of the `num_public` tasks of a data set that seed 0 draws: fewer than `count` if fewer remain.
    """
    is_hidden = seed >= HIDDEN_SEEDS
    if env.num_tasks is None:
        if not is_hidden:
            return list(range(count))
        tasks: Any = 2**31  # not listed
    else:
        public = draw_tasks(env, num_public, 0) if is_hidden else []
        tasks = np.setdiff1d(np.arange(env.num_tasks), public)
        count = min(count, len(tasks))
    chosen = np.random.default_rng(seed).choice(tasks, count, replace=False)
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
