"""What a run consists of: task lists and manifest, made from its configuration."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm

from agent_envs.errors import MissingExtraError
from agent_leaderboard.agents.agent import find_kind
from agent_leaderboard.play.config import EMBEDDED, AgentConfig, EnvironmentConfig, RunConfig
from agent_leaderboard.play.data_files import data_files, data_path, missing_data, reads_data
from agent_leaderboard.play.episodes import environment_maker, environment_seal
from agent_leaderboard.play.task_lists import draw_tasks, list_tasks, open_tool_env
from agent_leaderboard.play.training import trained_model
from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    AgentRecord,
    DataFile,
    EnvironmentRecord,
    LeftOut,
    Manifest,
)
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import TaskEntry, tasks_text
from agent_trainers import TINY_POLICY, small_models
from agent_trainers.small_models import SMALL_MODELS

PACKAGES: Final = ("agent-r1", "gymnasium", "numpy")
MODEL_PACKAGES: Final = ("torch", "transformers")
_OF_THIS_MACHINE: Final = ("model", "base_url", "api_key_env")
"""Settings that are no part of the manifest; the model has a field of its own."""


def find_model(agent: AgentConfig, work: Path) -> str | None:
    """Return the model as it is loaded, a folder or a name; None for an agent without one.

    It is trained into the folder `work`, if the run is to do so; one of `SMALL_MODELS` is
    downloaded, once.
    """
    if agent.train is not None:
        return str(trained_model(agent, work))
    model: str | None = agent.settings.get("model")
    if model is not None and model in SMALL_MODELS and find_kind(agent.kind_name).needs_model:
        return str(small_models.prepare(model))
    return str(TINY_POLICY) if model == EMBEDDED else model


def prepare(
    config: RunConfig, models: Mapping[str, str | None], data: Path | None
) -> tuple[Manifest, dict[str, list[TaskEntry]]]:
    """Return the manifest, and the task list of each environment.

    The model of each agent, by slug, is that of `find_model`.

    Raises:
        MissingExtraError: If an environment that is not optional lacks its extra.
        DataError: If data are missing or malformed.
    """
    environments, left_out = [], list(config.left_out)
    tasks: dict[str, list[TaskEntry]] = {}
    for environment in tqdm(config.environments, desc="listing tasks", leave=False):
        if environment.optional and (missing := missing_data(environment, data)):
            reason = f"its data are not at hand: {missing}"
            left_out.append(LeftOut(id=environment.id, reason=reason))
            continue
        try:
            record, tasks[environment.slug] = _environment(environment, config.protocol.seed, data)
            environments.append(record)
        except MissingExtraError as error:
            if not environment.optional:
                raise
            left_out.append(LeftOut(id=environment.id, reason=str(error)))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        protocol=config.protocol,
        environments=environments,
        agents=[_agent(agent, models[agent.slug]) for agent in config.agents],
        left_out=left_out,
    )
    return manifest, tasks


def _environment(
    config: EnvironmentConfig, seed: int, data: Path | None
) -> tuple[EnvironmentRecord, list[TaskEntry]]:
    env, max_turns = open_tool_env(environment_maker(config, None, data))
    record = EnvironmentRecord(
        slug=config.slug,
        id=config.id,
        kwargs=config.kwargs,
        max_turns=max_turns,
        reward_terms=dict(env.reward_weights),
        outcome_terms=sorted(env.outcome_terms & env.reward_weights.keys()),
        num_tasks=0,
        tasks_path=f"tasks/{config.slug}.json",
        tasks_sha256="",
        data=[
            DataFile(name=name, sha256=file_sha256(data_path(name, data)))
            for name in data_files(config, data)
        ],
        contamination=config.contamination,
        is_text_public=not reads_data(config),
        attack=config.attack,
        attack_on=config.attack_on,
    )
    seal = environment_seal(record, data)
    entries = list_tasks(env, draw_tasks(env, config.tasks, seed), seal)
    env.close()
    digest = hashlib.sha256(tasks_text(entries).encode()).hexdigest()
    return replace(record, num_tasks=len(entries), tasks_sha256=digest), entries


def _agent(config: AgentConfig, model: str | None) -> AgentRecord:
    kind = find_kind(config.kind_name)
    settings = {k: v for k, v in config.settings.items() if k not in _OF_THIS_MACHINE}
    packages = PACKAGES + (MODEL_PACKAGES if kind.needs_model else ())
    folder = Path(model) if model is not None and Path(model).is_dir() else None
    weights = sorted(folder.glob("*.safetensors")) if folder else []
    return AgentRecord(
        slug=config.slug,
        name=config.name,
        kind=config.kind_name,
        model=config.model or (folder.name if folder else model),
        made_by=config.made_by,
        weights_sha256={path.name: file_sha256(path) for path in weights},
        tool_format=kind.format_for(config.settings),
        settings=settings,
        train=config.train,
        prices=config.prices,
        organisation=config.organisation,
        url=config.url,
        licence=config.licence,
        packages={"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    )
