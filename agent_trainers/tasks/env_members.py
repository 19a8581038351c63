"""Entries of a list of environments, and the name that each is reported under."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import gymnasium as gym
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.command_line import json_object, refusal
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError


def _unique(tasks: list[int]) -> list[int]:
    if len(set(tasks)) < len(tasks):  # a duplicate could be trained on and held out
        raise ValueError("a task is listed more than once")
    return tasks


_Tasks = Annotated[
    list[Annotated[int, Field(ge=0, strict=True)]],
    BeforeValidator(lambda value: list(value) if isinstance(value, range) else value),
    Field(min_length=1),
    AfterValidator(_unique),
]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EnvMember:
    """One of several environments that a run trains in, or evaluates in."""

    id: Annotated[str, Field(min_length=1)] | Callable[..., Any]
    """A Gymnasium id, or a function that makes an environment."""
    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.,=+-]{0,79})?$")] = ""
    """Its name in metrics, ``env/<name>/success``; `name_members` derives one by default."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 1.0
    """Its share of the groups, relative to the others'."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the environment."""
    eval_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Those that differ in evaluation."""
    tasks: _Tasks | None = None
    """Indices of its tasks; None for all of them."""

    def make_env(self) -> Any:
        """Make one environment."""
        if callable(self.id):
            return self.id(**self.kwargs)
        return gym.make(self.id, **self.kwargs)

    def in_evaluation(self) -> "EnvMember":
        """Return the environment for evaluation: with `eval_kwargs`, and all of its tasks."""
        kwargs = {**self.kwargs, **self.eval_kwargs}
        return dataclasses.replace(self, kwargs=kwargs, eval_kwargs={}, tasks=None)

    def as_json(self) -> dict[str, Any]:
        """Return its entry in a settings file, without empty optional fields."""
        optional = ("eval_kwargs", "tasks")
        return {k: v for k, v in vars(self).items() if k in FIELDS and (v or k not in optional)}


FIELDS: Final = {field.name: field for field in dataclasses.fields(EnvMember)}
Member = str | Callable[[], Any] | Mapping[str, Any] | EnvMember


def read_members(values: Any, option: str, *, is_weighted: bool = True) -> list[EnvMember]:
    """Read one or several environments, each an id or ``{id, weight, kwargs, ...}``, also as JSON.

    Errors name `option`, the entry and the field; `is_weighted` allows weights and `eval_kwargs`.
    """
    is_several = isinstance(values, Sequence) and not isinstance(values, str)
    entries = values if is_several else [values]
    if not entries:
        raise ConfigurationError(f"{option} must list at least one environment.")
    members = [_read(value, f"{option}, entry {i}") for i, value in enumerate(entries, start=1)]
    for i, member in enumerate(members if not is_weighted else (), start=1):
        if member.weight != 1.0 or member.eval_kwargs:
            raise ConfigurationError(
                f"{option}, entry {i}: weight does nothing in an environment that is only "
                "evaluated, and kwargs replaces eval_kwargs. Leave them out."
            )
    return members


def _read(value: Any, place: str) -> EnvMember:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json_object(value, place)
    if isinstance(value, EnvMember):
        return value
    if not isinstance(value, Mapping):
        value = {"id": value}
    for key in value:
        lookup(FIELDS, key, kind=f"field of an environment ({place})")
    try:  # a key without a value is None in YAML
        return EnvMember(**{key: item for key, item in value.items() if item is not None})
    except ValidationError as error:
        raise refusal(place, error) from None


def name_members(
    trained: Sequence[EnvMember], variants: Sequence[EnvMember] = ()
) -> tuple[list[EnvMember], list[EnvMember]]:
    """Give every environment of a run a unique name, by default its id without the namespace."""
    named: list[EnvMember] = []
    for member in [*trained, *variants]:
        word = member.id if isinstance(member.id, str) else getattr(member.id, "__name__", "env")
        default = re.sub(r"[^\w.+]+", "-", re.split("[:/]", word)[-1], flags=re.ASCII).strip("-")
        name = member.name or default
        if any(name == other.name for other in named):
            raise ConfigurationError(
                f"Two environments of the run have the name {name!r}: give each a name. Those "
                "trained are evaluated anyway, and need no entry in eval_envs; equal ones are one "
                "entry with the sum of their weights."
            )
        named.append(dataclasses.replace(member, name=name))
    return named[: len(trained)], named[len(trained) :]
