"""Parts of commands: JSON options and one-line errors."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pydantic

from agent_envs.errors import AgentEnvsError, ConfigurationError


def json_object(value: str | None, option: str) -> dict[str, Any]:
    """Return the JSON object of an option."""
    try:
        parsed = json.loads(value or "{}")
    except ValueError as error:
        raise ConfigurationError(f"{option} is not valid JSON ({error}): {value}") from None
    if not isinstance(parsed, dict):
        raise ConfigurationError(f'{option} must be a JSON object such as {{"hops": 2}}: {value}')
    return parsed


def refusal(option: str, error: pydantic.ValidationError) -> ConfigurationError:
    """Return the error of an option's value: the option, the field, and what is wrong with it."""
    first = error.errors()[0]
    place = ": ".join(filter(None, (option, ".".join(map(str, first["loc"])))))
    return ConfigurationError(f"{place}: {first['msg']}, not {first['input']!r:.100}.")


@contextlib.contextmanager
def errors_of_one_line(program: str) -> Iterator[None]:
    """Exit with one line if the command line is wrong or the environment cannot be made."""
    try:
        yield
    except (AgentEnvsError, gym.error.Error, ImportError, OSError, TypeError) as error:
        if isinstance(error, TypeError) and "keyword argument" not in str(error):
            raise  # a defect of the environment, whose author needs the traceback
        sys.exit(f"{program}: {error}")
