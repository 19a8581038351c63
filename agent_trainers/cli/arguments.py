"""Parse options and YAML files into dataclasses; a mistyped name gets the nearest right one."""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from agent_envs.errors import ConfigurationError


def parse(
    arguments: Sequence[str],
    kinds: Sequence[Any],
    *,
    program: str,
    description: str,
    default_config: Path | None = None,
    presets: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Parse command-line options into one object per dataclass.

    Args:
        arguments: The options, without the program's name.
        kinds: Dataclasses, as `HfArgumentParser` takes them.
        program: The program's name, for its help.
        description: What it does, for its help.
        default_config: The settings where ``--config`` is not given.
        presets: Other defaults than the dataclasses' own; settings from a file win over them.

    Raises:
        SystemExit: On ``--help``, or if an option is unknown; the message has the nearest one.
        ConfigurationError: If the settings file is wrong.
    """
    parser = HfArgumentParser(
        kinds,
        prog=program,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", help="YAML file of settings; options on the command line win.")
    _set_defaults(parser, presets or {}, "presets")
    if (path := _config_path(arguments, default_config)) is not None:
        _set_defaults(parser, read_config(path), str(path))
    try:
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            list(arguments), return_remaining_strings=True
        )
    except ConfigurationError as error:
        parser.error(str(error))
    if unknown:
        parser.error(_unknown_option(parser, unknown[0]))
    return tuple(parsed)


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings.

    Raises:
        ConfigurationError: If it cannot be read or holds no mapping.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path}: cannot be read ({error.strerror}).") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config {path}: is not valid YAML: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"--config {path}: must hold 'option: value' lines.")
    return config


def json_object(value: str | Mapping[str, Any] | None, option: str) -> dict[str, Any]:
    """Return the object that an option holds: JSON text, or a mapping from YAML.

    Raises:
        ConfigurationError: If it is no JSON object.
    """
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ConfigurationError(f"{option} is not valid JSON ({error}): {value}") from None
    if not isinstance(parsed, dict):
        raise ConfigurationError(f'{option} must be a JSON object such as {{"hops": 2}}: {value}')
    return parsed


def peek(arguments: Sequence[str], option: str, default_config: Path | None = None) -> str | None:
    """Return what one option is set to, on the command line or in the file, before all are parsed.

    Raises:
        ConfigurationError: If the settings file is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{option}")
    known, _ = parser.parse_known_args(list(arguments))
    value: str | None = getattr(known, option)
    if value is None and (path := _config_path(arguments, default_config)) is not None:
        value = read_config(path).get(option)
    return value


def _config_path(arguments: Sequence[str], default: Path | None) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=default)
    known, _ = parser.parse_known_args(list(arguments))
    path: Path | None = known.config
    return path


def _set_defaults(parser: HfArgumentParser, settings: Mapping[str, Any], source: str) -> None:
    """Make settings the parser's defaults."""
    for name, value in settings.items():
        actions = [action for action in parser._actions if action.dest == name]
        if not actions:
            parser.error(f"{source}: {_unknown_option(parser, f'--{name}')}")
        for action in actions:  # a flag that is on by default has two: --name and --no_name
            action.default = json.dumps(value) if isinstance(value, dict) else value
            action.required = False


def _unknown_option(parser: argparse.ArgumentParser, option: str) -> str:
    name = option.split("=")[0]
    options = [string for action in parser._actions for string in action.option_strings]
    close = difflib.get_close_matches(name, options, n=1)
    hint = f" Did you mean {close[0]}?" if close else " See --help for all options."
    return f"unknown option {name}.{hint}"
