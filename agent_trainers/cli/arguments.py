"""Command-line options as dataclasses, with YAML files and suggestions for mistyped names."""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import gymnasium as gym
import yaml
from tqdm import tqdm
from transformers.hf_argparser import HfArgumentParser

from agent_envs.errors import (
    AgentEnvsError,
    ConfigurationError,
    DataError,
    MissingExtraError,
    UnknownNameError,
)

T = TypeVar("T")

_OTHERS: Final = "TRL and transformers"
_USER_ERRORS: Final = (
    ConfigurationError, DataError, MissingExtraError, UnknownNameError, gym.error.Error,
)  # fmt: skip


class CommandParser(HfArgumentParser):  # type: ignore[misc] # transformers is untyped
    """`HfArgumentParser` with grouped help, YAML defaults and two-line errors."""

    def __init__(
        self,
        kinds: Sequence[type],
        *,
        program: str,
        description: str = "",
        also_shown: Sequence[str] = (),
        show_all: bool = False,
    ) -> None:
        """Make an option of each field of the dataclasses `kinds`.

        ``--help`` lists our fields by class, then those of TRL in `also_shown`, or all of them.
        """
        super().__init__(kinds, prog=program, description=description, allow_abbrev=False)
        self.add_argument("--config")
        self.add_argument("--help_all", action="help")
        fields = [field for kind in kinds for field in dataclasses.fields(kind) if field.init]
        self._fields = {field.name: field for field in fields}
        # names in files: fields and their aliases, such as envs for env
        self._names = {field.name: field.name for field in fields} | {
            alias.lstrip("-"): field.name
            for field in fields
            for alias in field.metadata.get("aliases", ())
        }
        # transformers' parser replaces field.type
        self._annotations = {
            name: str(annotation)
            for kind in kinds
            for base in reversed(kind.__mro__)
            for name, annotation in inspect.get_annotations(base).items()
        }
        self._groups: dict[str, list[str]] = {}
        others = dict.fromkeys(self._fields)
        for base in (base for kind in kinds for base in kind.__mro__):
            if not base.__module__.startswith(("trl.", "transformers.", "builtins")):
                own = [name for name in inspect.get_annotations(base) if name in others]
                self._groups[str(base.__doc__).split("\n")[0].rstrip(".")] = own
                others = {name: None for name in others if name not in own}
        shown = [*others] if show_all else [name for name in also_shown if name in others]
        self._groups[_OTHERS] = shown
        self._num_hidden = len(others) - len(shown)
        self._source = ""

    def use_settings(self, settings: Mapping[str, Any], source: str) -> None:
        """Make settings the defaults, converted as on the command line; errors name `source`."""
        self._source = f"{source}: "
        values: dict[str, Any] = {}
        for given, value in settings.items():
            if (name := self._names.get(given)) is None:
                self.error(unknown_option(f"--{given}", self._names))
            if name in values:
                self.error(f"{name} and {given} are the same setting: give one of the two.")
            if isinstance(value, list) and "list" not in self._annotations[name]:
                self.error(f"{name} takes one value, not a list: {value}")
            if value is not None and not isinstance(value, list):
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                parsed = getattr(self.parse_known_args([f"--{name}={text}"])[0], name)
                value = value if isinstance(value, bool) else parsed  # TRL maps some booleans
            values[name] = value
        self._source = ""
        self.set_defaults(**values)

    def given(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options on a command line; those not on it are None."""
        before = {name: self.get_default(name) for name in self._fields}
        self.set_defaults(**dict.fromkeys(self._fields))
        helps = ("-h", "--help", "--help_all", "--help-all")
        values: argparse.Namespace
        values, _ = self.parse_known_args([a for a in arguments if a not in helps])
        self.set_defaults(**before)
        return values

    def read(
        self, arguments: Sequence[str], others: Callable[[list[str]], list[str]] = list
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the values by name, and the arguments that belong to another parser.

        `others` takes the arguments unknown here and returns those unknown there, too.

        Raises:
            SystemExit: On ``--help``, or if an option is wrong or unknown.
        """
        values, rest = self.parse_known_args(list(arguments))
        if unknown := others(rest):
            self.error(unknown_option(unknown[0], self._names))
        return values, rest

    def build(self, values: argparse.Namespace) -> tuple[Any, ...]:
        """Return one object per dataclass; the first error of their checks ends the process."""
        try:
            return tuple(self.parse_dict(vars(values), allow_extra_keys=True))
        except (ValueError, ImportError, OSError) as error:  # TRL's and transformers' own checks
            self.error(" ".join(str(error).split()))

    def error(self, message: str) -> NoReturn:
        """Print the error without argparse's usage, and exit with code 2."""
        refuse(self.prog, f"{self._source}{message}")

    def format_help(self) -> str:
        """Return the options by group, with their defaults."""
        parts = [f"usage: {self.prog} [--option value ...]", str(self.description)]
        for title, names in self._groups.items():
            options = [self._describe(name) for name in names]
            parts += ["\n".join([f"{title}:", *options])] if options else []
        parts.append("--config FILE: settings in YAML; the command line has priority.")
        if self._num_hidden:
            parts.append(f"{self._num_hidden} more options, of {_OTHERS}: {self.prog} --help_all")
        return "\n\n".join(parts) + "\n"

    def _describe(self, name: str) -> str:
        default = self.get_default(name)
        default = str(default).lower() if isinstance(default, bool) else default
        line = f"  --{name}" if default is None else f"  --{name} (default: {default})"
        text = self._fields[name].metadata.get("help", "").replace("%%", "%")
        return "\n".join([line, textwrap.indent(textwrap.fill(text, 92), " " * 8)])


def unknown_option(option: str, known: Iterable[str]) -> str:
    """Return the message for an unknown option, with the closest known name."""
    name = option.split("=")[0]
    close = difflib.get_close_matches(name, [f"--{other}" for other in known], n=1)
    return f"unknown option {name}." + (f" Did you mean {close[0]}?" if close else "")


def notifier(program: str) -> Callable[[str], None]:
    """Return a function that prints a status line to stderr, above any progress bar."""

    def notify(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may have been closed
            tqdm.write(f"{program}: {text}", file=sys.stderr)
            sys.stderr.flush()

    return notify


def refuse(program: str, message: str) -> NoReturn:
    """Print what is wrong with a command line, and exit with code 2."""
    sys.stderr.write(f"{program}: {message}\nAll options: {program} --help\n")
    sys.exit(2)


def parse(arguments: Sequence[str], kind: type[T], *, program: str, description: str) -> T:
    """Parse a command line and its ``--config`` file into one object."""
    parser = CommandParser((kind,), program=program, description=description)
    if (config := parser.given(arguments).config) is not None:
        parser.use_settings(read_config(Path(config)), config)
    parsed: T = parser.build(parser.read(arguments)[0])[0]
    return parsed


def run_command(
    program: str, run: Callable[[list[str]], None], arguments: Sequence[str] | None
) -> None:
    """Call `run` with a command line (None: this process's), with errors as one line.

    The exit code is 2 for a wrong command line or input, 1 for a failure while running, 130 after
    Ctrl-C.
    """
    try:
        run(list(sys.argv[1:] if arguments is None else arguments))
    except (AgentEnvsError, gym.error.Error) as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2 if isinstance(error, _USER_ERRORS) else 1)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: Stopped.\n")
        sys.exit(130)


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """Read a YAML mapping of settings; `option` is named in errors.

    Raises:
        ConfigurationError: If the file cannot be read or is not a mapping from names.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: cannot be read ({error.strerror}).") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{option} {path}: is not valid YAML: {reason}") from None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise ConfigurationError(f"{option} {path}: must contain 'option: value' lines.")
    return config


def check_range(options: Any, words: str, is_right: Callable[[Any], bool], *names: str) -> None:
    """Raise `ConfigurationError` for the first option that is set and out of range."""
    for name in names:
        if (value := getattr(options, name, None)) is not None and not is_right(value):
            raise ConfigurationError(f"--{name} must be {words}, not {value}.")
