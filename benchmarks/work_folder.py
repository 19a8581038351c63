"""A folder in which a benchmark keeps what is done, so that the same command goes on."""

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError


def check_same_settings(options: Any, work: Path, *, may_change: Collection[str]) -> None:
    """Note the settings in a new folder; refuse to put results of others into one table.

    Args:
        options: A dataclass of the command's settings.
        work: The folder; made if need be.
        may_change: Settings on which no result depends.

    Raises:
        ConfigurationError: If the folder holds results with other settings; says which.
    """
    path = work / "settings.json"
    given = {name: value for name, value in asdict(options).items() if name not in may_change}
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_json(path, given)
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    if differing := [name for name in given if kept.get(name) != given[name]]:
        changes = "; ".join(f"{n}: {kept.get(n)!r} -> {given[n]!r}" for n in differing)
        raise ConfigurationError(
            f"--work {work} holds results with other settings ({changes}). Give the same again, or "
            "choose another folder."
        )
