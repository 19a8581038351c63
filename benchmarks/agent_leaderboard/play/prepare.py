"""Preparing a run: its models, task lists and manifest."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError, MissingExtraError
from agent_leaderboard.agents.agent import find_kind
from agent_leaderboard.play.config import RunConfig
from agent_leaderboard.play.environments import configured_environment, missing_data
from agent_leaderboard.play.tasks import complete_record
from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    AgentRecord,
    LeftOut,
    Manifest,
)
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import TaskEntry
from agent_trainers import TINY_POLICY, small_models
from agent_trainers.small_models import SMALL_MODELS

PACKAGES: Final = ("agent-r1", "gymnasium", "numpy")
MODEL_PACKAGES: Final = ("torch", "transformers")
_LOCAL_SETTINGS: Final = ("model", "base_url", "api_key_env")
"""Settings that are not in the manifest; the model has its own field."""
EMBEDDED: Final = "embedded"
"""Name of the model that comes with the package."""
_TRAINED_WITH: Final = "trained_with.json"


def prepare(
    config: RunConfig, models: Mapping[str, str | None], data: Path | None
) -> tuple[Manifest, dict[str, list[TaskEntry]]]:
    """Return the manifest, and the task list of each environment.

    `models` has the model of each agent, by slug, from `find_model`.
    """
    environments, left_out = [], list(config.left_out)
    tasks: dict[str, list[TaskEntry]] = {}
    for environment in tqdm(config.environments, desc="listing tasks", leave=False):
        is_optional = environment.slug in config.optional
        try:
            if is_optional and (missing := missing_data(environment, data)):
                reason = f"its data are missing: {missing}"
            else:
                record, tasks[environment.slug] = complete_record(
                    environment,
                    configured_environment(environment, None, data),
                    count=environment.num_tasks,
                    seed=config.protocol.seed,
                    data=data,
                )
                environments.append(record)
                continue
        except MissingExtraError as error:
            if not is_optional:
                raise
            reason = str(error)
        left_out.append(LeftOut(id=environment.id, reason=reason))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        protocol=config.protocol,
        environments=environments,
        agents=[_complete(agent, models[agent.slug]) for agent in config.agents],
        left_out=left_out,
    )
    return manifest, tasks


def _complete(agent: AgentRecord, model: str | None) -> AgentRecord:
    """Return the record of a configured agent, with what identifies its model and its code."""
    kind = find_kind(agent.kind)
    packages = PACKAGES + (MODEL_PACKAGES if kind.needs_model else ())
    folder = Path(model) if model is not None and Path(model).is_dir() else None
    weights = sorted(folder.glob("*.safetensors")) if folder else []
    return dataclasses.replace(
        agent,
        model=agent.model or (folder.name if folder else model),
        weights_sha256={path.name: file_sha256(path) for path in weights},
        tool_format=kind.format_for(agent.settings),
        settings={k: v for k, v in agent.settings.items() if k not in _LOCAL_SETTINGS},
        packages={"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
    )


# Models


def find_model(agent: AgentRecord, work: Path) -> str | None:
    """Return the folder or name of an agent's model, or None.

    A model that the run trains is trained into `work`; one of `SMALL_MODELS` is downloaded.
    """
    if agent.train is not None:
        return str(_trained_model(agent, work))
    model: str | None = agent.settings.get("model")
    if model is not None and model in SMALL_MODELS and find_kind(agent.kind).needs_model:
        return str(small_models.prepare(model))
    return str(TINY_POLICY) if model == EMBEDDED else model


def _trained_model(agent: AgentRecord, work: Path) -> Path:
    """Return the folder of the model that ``agent.train`` describes; train it if it is missing.

    The folder gets its name when training is complete; interrupted training starts again.
    """
    folder = work / agent.slug
    settings = folder / _TRAINED_WITH
    if settings.exists() and json.loads(settings.read_text(encoding="utf-8")) == agent.train:
        return folder
    work.mkdir(parents=True, exist_ok=True)
    for obsolete in (folder, *work.glob(f".{agent.slug}-*")):
        shutil.rmtree(obsolete, ignore_errors=True)
    scratch = work / f".{agent.slug}-{os.getpid()}"
    scratch.mkdir()
    command = [
        sys.executable, "-m", "agent_trainers.cli.train",
        *_options(agent.train or {}), "--output_dir", str(scratch),
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603 - our own module
        raise ConfigurationError(
            f"agent {agent.name!r}: training failed (see above): {' '.join(command)}"
        )
    for checkpoint in scratch.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    write_json(scratch / _TRAINED_WITH, agent.train)
    scratch.rename(folder)
    return folder


def _options(train: Mapping[str, Any]) -> Iterator[str]:
    for name, value in train.items():
        yield f"--{name}"
        if isinstance(value, list):
            yield from map(str, value)
        else:
            yield json.dumps(value) if isinstance(value, dict | bool) else str(value)
