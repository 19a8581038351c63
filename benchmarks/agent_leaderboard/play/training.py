"""Train an agent's model as part of a run: once, into the run's own work folder."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_leaderboard.play.config import AgentConfig

_SETTINGS_FILE: Final = "trained_with.json"


def trained_model(agent: AgentConfig, work: Path) -> Path:
    """Return the folder of the model that ``agent.train`` asks for; train it if it is not there.

    Training that was cut off is begun anew: a folder takes its name when it is whole.

    Raises:
        ConfigurationError: If training fails.
    """
    folder = work / agent.slug
    if _settings(folder) == agent.train:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    for left_over in work.glob(f".{agent.slug}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
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
    write_json(scratch / _SETTINGS_FILE, agent.train)
    scratch.rename(folder)
    return folder


def _settings(folder: Path) -> Any:
    path = folder / _SETTINGS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _options(train: Mapping[str, Any]) -> Iterator[str]:
    for name, value in train.items():
        yield f"--{name}"
        if isinstance(value, list):
            yield from map(str, value)
        else:
            yield json.dumps(value) if isinstance(value, dict | bool) else str(value)
