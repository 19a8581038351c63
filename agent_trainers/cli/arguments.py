"""Parse options and YAML files into dataclasses; a mistyped name gets the nearest right one."""

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

_TEXT_WIDTH: Final = 92
_OTHERS: Final = "TRL and transformers"
_MISTAKES: Final = (
    ConfigurationError, DataError, MissingExtraError, UnknownNameError, gym.error.Error,
)  # fmt: skip
"""What is wrong with a command line or what it names, as against what fails while it runs."""


class CommandParser(HfArgumentParser):  # type: ignore[misc] # transformers is untyped
    """transformers' parser, with help that shows what matters first, and errors of two lines."""

    def __init__(
        self,
        kinds: Sequence[type],
        *,
        program: str,
        description: str,
        groups: Mapping[str, Sequence[str]] | None = None,
        show_all: bool = False,
    ) -> None:
        """Make an option of each field of dataclasses, as `HfArgumentParser` takes them.

        ``--help`` shows them by `groups`, heading -> names of options: all in one if not given.
        Those in no group it shows if `show_all`.
        """
        super().__init__(kinds, prog=program, description=description, allow_abbrev=False)
        self.add_argument("--config")
        self.add_argument("--help_all", action="help")
        self._fields = {
            field.name: field for kind in kinds for field in dataclasses.fields(kind) if field.init
        }
        # a field's own type is no longer what was written: transformers' parser changes it
        self._annotations = {
            name: str(annotation)
            for kind in kinds
            for base in reversed(kind.__mro__)
            for name, annotation in inspect.get_annotations(base).items()
        }
        groups = groups or {"options": tuple(self._fields)}
        grouped = {name for names in groups.values() for name in names}
        others = tuple(name for name in self._fields if name not in grouped)
        self._groups = dict(groups) | ({_OTHERS: others} if show_all else {})
        self._num_hidden = 0 if show_all else len(others)
        self._source = ""

    def use_settings(self, settings: Mapping[str, Any], source: str) -> None:
        """Make settings the defaults; each is checked and converted as on the command line.

        Lists and None are taken as they are. `source` is named in messages.
        """
        self._source = f"{source}: "
        values = {}
        for name, value in settings.items():
            if name not in self._fields:
                self.error(unknown_option(f"--{name}", self._fields))
            if isinstance(value, list) and "list" not in self._annotations[name]:
                self.error(f"{name} takes one value, not a list: {value}")
            if value is not None and not isinstance(value, list):
                text = json.dumps(value) if isinstance(value, bool | dict) else str(value)
                given, _ = self.parse_known_args([f"--{name}={text}"])
                # some of TRL's options are texts on the command line and take a bool from a file
                value = value if isinstance(value, bool) else getattr(given, name)
            values[name] = value
        self._source = ""
        self.set_defaults(**values)

    def check(
        self, arguments: Sequence[str], others: Callable[[list[str]], list[str]] = list
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line into values by name, and what is no option here.

        `others` returns, of what is no option here, what is none elsewhere either.

        Raises:
            SystemExit: On ``--help``, or if an option is wrong or unknown.
        """
        values, left_over = self.parse_known_args(list(arguments))
        if unknown := others(left_over):
            self.error(unknown_option(unknown[0], self._fields))
        return values, left_over

    def parse(
        self, arguments: Sequence[str], others: Callable[[list[str]], list[str]] = list
    ) -> tuple[Any, ...]:
        """Parse a command line into one object per dataclass; see `check`."""
        self.check(arguments, others)
        try:
            *parsed, _, _ = self.parse_args_into_dataclasses(
                list(arguments), return_remaining_strings=True, look_for_args_file=False
            )
            return tuple(parsed)
        except (ValueError, ImportError, OSError) as error:  # TRL's and transformers' own checks
            self.error(" ".join(str(error).split()))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in two lines; argparse would show the whole usage first."""
        refuse(self.prog, f"{self._source}{message}")

    def format_help(self) -> str:
        """Return the options by group, with their defaults."""
        parts = [f"usage: {self.prog} [--option value ...]", str(self.description)]
        for title, names in self._groups.items():
            options = [self._describe(name) for name in names if name in self._fields]
            parts += ["\n".join([f"{title}:", *options])] if options else []
        parts.append("--config FILE: settings in YAML; options on the command line win.")
        if self._num_hidden:
            parts.append(f"{self._num_hidden} more options, of {_OTHERS}: {self.prog} --help_all")
        return "\n\n".join(parts) + "\n"

    def _describe(self, name: str) -> str:
        default = self.get_default(name)
        default = str(default).lower() if isinstance(default, bool) else default
        line = f"  --{name}" if default is None else f"  --{name} (default: {default})"
        text = self._fields[name].metadata.get("help", "").replace("%%", "%")
        return "\n".join([line, *(f"{' ' * 8}{part}" for part in textwrap.wrap(text, _TEXT_WIDTH))])


def unknown_option(option: str, known: Iterable[str]) -> str:
    """Say that there is no such option, and which is nearest."""
    name = option.split("=")[0]
    close = difflib.get_close_matches(name, [f"--{other}" for other in known], n=1)
    return f"unknown option {name}." + (f" Did you mean {close[0]}?" if close else "")


def speaker(program: str) -> Callable[[str], None]:
    """Return the function that tells a command's user something, in a line beside progress bars."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            tqdm.write(f"{program}: {text}", file=sys.stderr)
            sys.stderr.flush()

    return say


def refuse(program: str, message: str) -> NoReturn:
    """Say in two lines what is wrong with a command line, and exit with code 2."""
    sys.stderr.write(f"{program}: {message}\nAll options: {program} --help\n")
    sys.exit(2)


def parse(arguments: Sequence[str], kind: type[T], *, program: str, description: str) -> T:
    """Parse a command line, and the file that its ``--config`` names, into one object."""
    parser = CommandParser((kind,), program=program, description=description)
    if (config := parser.check(arguments)[0].config) is not None:
        parser.use_settings(read_config(Path(config)), config)
    parsed: T = parser.parse(arguments)[0]
    return parsed


def run_command(
    program: str, run: Callable[[list[str]], None], arguments: Sequence[str] | None
) -> None:
    """Call `run` with a command line, this process's if None; an error is one line and a code.

    Exits with 2 where the command line, or what it names, is wrong, with 1 where the work failed,
    and with 130 after Ctrl-C.
    """
    try:
        run(list(sys.argv[1:] if arguments is None else arguments))
    except (AgentEnvsError, gym.error.Error) as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2 if isinstance(error, _MISTAKES) else 1)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: Stopped.\n")
        sys.exit(130)


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """Read a YAML file of settings, which `option` named.

    Raises:
        ConfigurationError: If it cannot be read or holds no mapping from names.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{option} {path}: is no UTF-8 text ({error}).") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(
            f"{option} {path}{place}: is not valid YAML: {error.problem or error.context}."
        ) from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{option} {path}: is not valid YAML: {reason}") from None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise ConfigurationError(f"{option} {path}: must hold 'option: value' lines.")
    return config


def check_range(options: Any, words: str, is_right: Callable[[Any], bool], *names: str) -> None:
    """Refuse options that are given and out of their range.

    Raises:
        ConfigurationError: Names the first.
    """
    for name in names:
        if (value := getattr(options, name, None)) is not None and not is_right(value):
            raise ConfigurationError(f"--{name} must be {words}, not {value}.")
