"""Parts of commands: JSON options, ranges of numbers, and one-line errors."""

import argparse
import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import gymnasium as gym
import pydantic

from agent_envs.errors import AgentEnvsError, ConfigurationError

_RANGES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "in [0, 65535]": lambda value: 0 <= value <= 65535,
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "at least 2": lambda value: value >= 2,
    "-1, or at least 1": lambda value: value == -1 or value >= 1,
    "more than 1": lambda value: value > 1,
    "positive": lambda value: value > 0,
}


class CommandLineParser(argparse.ArgumentParser):
    """A parser that prints errors without the usage, which can be long."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        """Name the program as it was called: `prog`, or ``python -m package.module``."""
        module = getattr(sys.modules["__main__"], "__spec__", None)
        if prog is None and module is not None:
            prog = f"python -m {module.name.removesuffix('.__main__')}"
        super().__init__(prog, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\nAll options: {self.prog} --help\n")


def positive_int(text: str) -> int:
    """Read a number of at least 1, as a ``type`` of argparse."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``2,000 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def json_object(value: str | None, option: str) -> dict[str, Any]:
    """Return the JSON object of an option."""
    try:
        parsed = json.loads(value or "{}", object_pairs_hook=unique_keys)
    except ValueError as error:
        raise ConfigurationError(f"{option} is not valid JSON ({error}): {value}") from None
    if not isinstance(parsed, dict):
        raise ConfigurationError(f'{option} must be a JSON object such as {{"hops": 2}}: {value}')
    return parsed


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of pairs in JSON; readers differ in which of two equal keys they take."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object repeats a key")
    return made


def refusal(option: str, error: pydantic.ValidationError) -> ConfigurationError:
    """Return the error of an option's value: the option, the field, and what is wrong with it."""
    first = error.errors()[0]
    place = ": ".join(filter(None, (option, ".".join(map(str, first["loc"])))))
    text = re.sub("a valid dictionary.*", "a JSON object", first["msg"])
    return ConfigurationError(f"{place}: {text}, not {first['input']!r:.100}.")


def silence_retries() -> None:
    """Do not log each attempt to reach the hub: the error at the end gives the reason."""
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


@contextlib.contextmanager
def errors_of_one_line(program: str) -> Iterator[None]:
    """Exit with one line if the command line is wrong or the environment cannot be made."""
    silence_retries()
    try:
        yield
    except (AgentEnvsError, gym.error.Error, ImportError, OSError, SyntaxError, TypeError) as error:
        is_of_arguments = re.search("(keyword|required positional) argument", str(error))
        if isinstance(error, TypeError) and not is_of_arguments:
            raise  # a defect of the environment, whose author needs the traceback
        sys.exit(f"{program}: {with_hint(error)}")


def with_hint(error: Exception) -> str:
    """Return the text of an error; of an unknown id, also the command that lists all ids."""
    is_unknown = isinstance(error, gym.error.UnregisteredEnv)
    return f"{error} All ids: python -m agent_envs list" if is_unknown else str(error)


def check_range(options: Any, words: str, *names: str) -> None:
    """Raise `ConfigurationError` for the first number that is set and out of a range of `_RANGES`.

    Infinity and NaN are in none.
    """
    for name in names:
        value = getattr(options, name, None)
        if value is not None and not (-math.inf < value < math.inf and _RANGES[words](value)):
            raise ConfigurationError(f"{name} must be {words}, not {value}.")
