"""Command-line options as dataclasses, with YAML files and suggestions for mistyped names."""

import argparse
import contextlib
import dataclasses
import difflib
import json
import sys
import typing
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

_USER_ERRORS: Final = (
    ConfigurationError, DataError, MissingExtraError, UnknownNameError, gym.error.Error,
)  # fmt: skip


class CommandParser(HfArgumentParser):  # type: ignore[misc] # transformers is untyped
    """`HfArgumentParser` with YAML defaults, errors of two lines, and a help without TRL's rest."""

    def __init__(
        self,
        kinds: Sequence[type],
        *,
        program: str,
        description: str = "",
        also_shown: Sequence[str] = (),
        show_all: bool = False,
    ) -> None:
        """Make options of dataclasses; ``--help`` shows ours, `also_shown`, or all of them."""
        super().__init__(
            kinds, prog=program, description=description, allow_abbrev=False,
            usage="%(prog)s [--option value ...]",
        )  # fmt: skip
        self.add_argument("--config", help="Settings in YAML; the command line has priority.")
        self.add_argument("--help_all", action="help", help="Show TRL's other options, too.")
        fields = [field for kind in kinds for field in dataclasses.fields(kind) if field.init]
        self._fields = [field.name for field in fields]
        # names in files: fields and their aliases, such as envs for env
        self._names = {name: name for name in self._fields} | {
            alias.lstrip("-"): field.name
            for field in fields
            for alias in field.metadata.get("aliases", ())
        }
        self._types = {k: str(v) for kind in kinds for k, v in typing.get_type_hints(kind).items()}
        bases = [base for kind in kinds for base in kind.__mro__]
        theirs = [base for base in bases if base.__module__.startswith(("trl.", "transformers."))]
        ours = {
            k for base in bases if base not in theirs for k in vars(base).get("__annotations__", ())
        }
        for action in self._actions:
            if action.dest in self._names and action.dest not in {*ours, *also_shown}:
                action.help = action.help if show_all else argparse.SUPPRESS
        self._source = ""

    def use_settings(self, settings: Mapping[str, Any], source: str) -> None:
        """Make settings the defaults, converted as on the command line; errors name `source`."""
        self._source = f"{source}: "
        values: dict[str, Any] = {}
        for given, value in settings.items():
            if (name := self._names.get(given)) is None:
                self.error(unknown_option(f"--{given}", self._names))
            if isinstance(value, list) and "list" not in self._types[name]:
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
        helps = ("-h", "--help", "--help_all", "--help-all")
        kept = [argument for argument in arguments if argument not in helps]
        unset = argparse.Namespace(**dict.fromkeys(self._fields))
        values: argparse.Namespace = self.parse_known_args(kept, unset)[0]
        return values

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the values by name; ends the process if an option is wrong or unknown."""
        values: argparse.Namespace
        values, unknown = self.parse_known_args(list(arguments))
        if unknown:
            self.error(unknown_option(unknown[0], self._names))
        return values

    def build(self, values: argparse.Namespace) -> tuple[Any, ...]:
        """Return one object per dataclass; the first error of their checks ends the process."""
        try:
            return tuple(self.parse_dict(vars(values), allow_extra_keys=True))
        except (ValueError, ImportError, OSError) as error:  # TRL's and transformers' own checks
            self.error(" ".join(str(error).split()))

    def error(self, message: str) -> NoReturn:
        """Print the error without argparse's usage, and exit with code 2."""
        refuse(self.prog, f"{self._source}{message}")


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
    parsed: T = parser.build(parser.read(arguments))[0]
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
    """Read a YAML mapping of settings; `option` is named in errors."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
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
