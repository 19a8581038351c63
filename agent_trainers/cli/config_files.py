"""YAML files of settings; imports no library that takes seconds to load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent_envs.errors import ConfigurationError


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key given twice, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} is given twice")
        return super().construct_mapping(node, deep)


def read_settings(path: Path, aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a file of options; dashes and `aliases` become the names of the options."""
    settings: dict[str, Any] = {}
    for option, value in read_config(path).items():
        name = option.replace("-", "_")
        name = (aliases or {}).get(name, name)
        if name in settings:
            raise ConfigurationError(
                f"--config {path}: {option!r} sets {name!r} again. Remove one."
            )
        settings[name] = value
    if "config" in settings:
        raise ConfigurationError(f"--config {path}: cannot name another file. Remove 'config'.")
    return settings


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """Read a YAML mapping of settings; `option` is named in errors."""
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506 - is safe
        json.dumps(config)  # no dates, sets, bytes or cycles
    except (OSError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{option} {path}: is not valid YAML: {reason}") from None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise ConfigurationError(f"{option} {path}: must contain 'option: value' lines.")
    return config
