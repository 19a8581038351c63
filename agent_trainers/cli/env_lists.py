"""The environments that a command line or a settings file names: one, or several by weight."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.tasks.env_members import EnvMember, name_members, read_members

LISTS: Final[Mapping[str, str]] = {"--env": "--envs", "--eval_env": "--eval_envs"}
"""Options that may be given several times, and the list that they then are."""


class Environments(NamedTuple):
    """What a run trains in, and what else it is measured in."""

    trained: list[EnvMember]
    """With their names, and the arguments that hold for all."""
    variants: list[EnvMember]
    """With theirs."""

    @property
    def is_one(self) -> bool:
        """Whether there is one environment alone, all of whose tasks are played."""
        return len(self.trained) == 1 and self.trained[0].tasks is None

    @property
    def title(self) -> str:
        """What is trained in, for people."""
        if self.is_one:
            return str(self.trained[0].id)
        return " + ".join(f"{m.name} x {m.weight:g}" for m in self.trained)

    def as_settings(self) -> dict[str, Any]:
        """Return what a settings file and ``results.json`` say of it."""
        first = self.trained[0]
        settings: dict[str, Any] = {
            "env": first.id if self.is_one else None,
            "env_kwargs": dict(first.kwargs) if self.is_one else {},
            "eval_env_kwargs": dict(first.eval_kwargs) if self.is_one else {},
        }
        if not self.is_one:
            settings["envs"] = [member.as_json() for member in self.trained]
        if self.variants:
            settings["eval_envs"] = [member.as_json() for member in self.variants]
        return settings


def gather_lists(arguments: Sequence[str]) -> list[str]:
    """Write ``--env`` that is given several times, or as JSON, as the list ``--envs``.

    ``--eval_env`` is always one of a list.

    Raises:
        ConfigurationError: If both ways are used at once.
    """
    others = list(arguments)
    for option, as_list in LISTS.items():
        values, rest = _take(option, others)
        if not values or (option == "--env" and len(values) == 1 and not _is_json(values[0])):
            continue
        if any(argument.split("=")[0].replace("-", "_") == as_list.replace("-", "_")
               for argument in rest):  # fmt: skip
            raise ConfigurationError(f"{option} and {as_list}: give one of the two.")
        others = [*rest, as_list, *values]
    return others


def environments_of(options: Any) -> Environments:
    """Return the environments that the options of ``agent-r1-train`` name.

    ``env_kwargs`` and ``eval_env_kwargs`` hold for all of several, where one has no others.

    Raises:
        ConfigurationError: If an entry is wrong, or arguments are no JSON object.
    """
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    eval_kwargs = json_object(options.eval_env_kwargs, "--eval_env_kwargs")
    listed = [options.env] if options.envs is None else options.envs
    members = [
        replace(
            member,
            kwargs={**kwargs, **member.kwargs},
            eval_kwargs={**eval_kwargs, **member.eval_kwargs},
        )
        for member in read_members(listed, "env" if options.envs is None else "envs")
    ]
    variants = (
        []
        if options.eval_envs is None
        else read_members(options.eval_envs, "eval_envs", is_weighted=False)
    )
    trained, others = name_members(members, variants)
    # the number that a weight is does not matter where there is no other
    return Environments([replace(trained[0], weight=1.0)] if len(trained) == 1 else trained, others)


def ids_in(values: Any, option: str) -> list[str]:
    """Return the ids that a list of environments names; none where there is no list."""
    if values is None:
        return []
    members = read_members(values, option, is_weighted=option == "envs")
    return [str(member.id) for member in members]


def _is_json(value: str) -> bool:
    return value.lstrip().startswith("{")


def _take(option: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of an option, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(option, option.replace("_", "-"), action="append", default=[], dest="all")
    try:
        taken, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # without a value; the command's own parser says so
        return [], list(arguments)
    return taken.all, rest
