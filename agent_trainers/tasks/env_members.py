"""Several environments in one run: how each is written down, and the name it is reported under."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError

NAME: Final = re.compile(r"[A-Za-z0-9_][\w.,=+-]{0,79}", re.ASCII)
"""What an environment may be called: part of a metric's name, ``env/<name>/success``."""
_EXAMPLE: Final = (
    "[{id: AgentR1/SyntheticMultiHop-v0, weight: 2, kwargs: {hops: [1, 2]}}, "
    "{id: AgentR1/SyntheticTable-v0}]"
)
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvMember:
    """One of several environments that are trained in, or measured in, together."""

    id: str | Callable[[], Any]
    """A Gymnasium id, or a function that makes an environment."""
    name: str = ""
    """What it is reported under; `name_members` makes one where none is given."""
    weight: float = 1.0
    """Its share of the groups that are played, as against the others'; more than 0."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    eval_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Those that differ where it is measured."""
    tasks: Sequence[int] | None = None
    """Indices of the tasks that are played; None for all of them."""

    def make_env(self) -> Any:
        """Make one environment."""
        make = self.id if callable(self.id) else lambda **kwargs: gym.make(str(self.id), **kwargs)
        return make(**self.kwargs)

    def as_json(self) -> dict[str, Any]:
        """Return it as a settings file holds it, without what was not given."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        optional = ("eval_kwargs", "tasks")
        return {k: v for k, v in record.items() if v or k not in optional}


Member = str | Callable[[], Any] | Mapping[str, Any] | EnvMember


def read_members(values: Any, option: str, *, is_weighted: bool = True) -> list[EnvMember]:
    """Read the entries of a list of environments, each an id or ``{id, weight, kwargs, ...}``.

    Args:
        values: The list; an entry may be JSON text, as on a command line.
        option: What it is called in errors: ``envs``.
        is_weighted: Whether entries may have a weight.

    Raises:
        ConfigurationError: If an entry is wrong; names it and the field.
        UnknownNameError: If there is no such field.
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence) or not values:
        raise ConfigurationError(
            f"{option} must be a list of environments, such as {_EXAMPLE}: {values!r}"
        )
    members = [_read(value, f"{option}, entry {i}") for i, value in enumerate(values, start=1)]
    for i, (member, value) in enumerate(zip(members, values, strict=True), start=1):
        if not is_weighted and member.weight != 1.0:
            raise ConfigurationError(
                f"{option}, entry {i}: weight does nothing where each environment is measured by "
                f"itself. Leave it out: {value!r}"
            )
        if not is_weighted and member.eval_kwargs:
            raise ConfigurationError(
                f"{option}, entry {i}: it is only measured, so its arguments are its kwargs. "
                f"Write kwargs instead of eval_kwargs: {value!r}"
            )
    return members


def name_members(
    trained: Sequence[EnvMember], variants: Sequence[EnvMember] = ()
) -> tuple[list[EnvMember], list[EnvMember]]:
    """Give every environment of a run a name of its own.

    A name that is not given is the id without its namespace; where that is not enough, with the
    arguments in which the environment differs from those of the same id: ``Name-v0,hops=3``. A
    variant that is played just as an environment of `trained` is measured anyway is left out,
    unless it names its tasks.

    Raises:
        ConfigurationError: If two have the same name, or are the same and have none.
    """
    named = _with_names(trained, [member for member in trained if not member.name])
    measured = [(m.id, {**m.kwargs, **m.eval_kwargs}) for m in trained]
    others = [
        variant
        for variant in variants
        if variant.name
        or variant.tasks is not None
        or (variant.id, dict(variant.kwargs)) not in measured
    ]
    return named, _with_names(others, [*trained, *others], taken=named)


def _with_names(
    members: Sequence[EnvMember], relatives: Sequence[EnvMember], taken: Sequence[EnvMember] = ()
) -> list[EnvMember]:
    """Name `members` apart from each other, from those of the same id, and from `taken`."""
    named: list[EnvMember] = []
    for member in members:
        name = member.name or _derived(member, [m for m in relatives if m.id == member.id])
        if any(name == other.name for other in [*taken, *named]):
            raise ConfigurationError(
                f"Two environments of the run would be reported as {name!r}. Give each a name of "
                f"its own: {{id: {member.id}, name: ..., kwargs: ...}}; or, if they are the same, "
                "write it once, with the sum of their weights."
            )
        named.append(replace(member, name=name))
    return named


def _derived(member: EnvMember, relatives: Sequence[EnvMember]) -> str:
    """Return a name made of the id and of the arguments in which it differs from `relatives`."""
    word = member.id if isinstance(member.id, str) else getattr(member.id, "__name__", "env")
    name = _clean(re.split("[:/]", word)[-1]) or "env"
    for key in dict.fromkeys(key for relative in relatives for key in relative.kwargs):
        values = [relative.kwargs.get(key, _ABSENT) for relative in relatives]
        if any(value != values[0] for value in values):
            own = member.kwargs.get(key, _ABSENT)
            name += f",{_clean(key)}={'default' if own is _ABSENT else _clean(_text(own))}"
    return name[:80]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _clean(text: str) -> str:
    return re.sub(r"[^\w.+]+", "-", text, flags=re.ASCII).strip("-")


def _read(value: Any, place: str) -> EnvMember:
    if isinstance(value, EnvMember):
        member = value
    elif isinstance(value, str) and not value.lstrip().startswith("{"):
        member = EnvMember(id=value)
    elif isinstance(value, str):
        try:
            member = _from_mapping(json.loads(value), place)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{place} is not valid JSON ({error}): {value}") from None
    elif isinstance(value, Mapping):
        member = _from_mapping(value, place)
    elif callable(value):
        member = EnvMember(id=value)
    else:
        raise ConfigurationError(
            f"{place} must be an id or {{id: ..., weight: ..., kwargs: ...}}, not {value!r}."
        )
    _check(member, place)
    return member


def _from_mapping(value: Mapping[str, Any], place: str) -> EnvMember:
    known: Collection[str] = [entry.name for entry in fields(EnvMember)]
    for key in value:
        lookup(dict.fromkeys(known), key, kind=f"field of an environment ({place})")
    if "id" not in value:
        raise ConfigurationError(
            f"{place}: 'id' is missing (found: {', '.join(value) or 'nothing'}). Such as {_EXAMPLE}"
        )
    # a key without a value is None in YAML
    return EnvMember(**{key: item for key, item in value.items() if item is not None})


def _check(member: EnvMember, place: str) -> None:
    if not callable(member.id) and not (isinstance(member.id, str) and member.id):
        raise ConfigurationError(
            f"{place}: id must be a Gymnasium id such as AgentR1/GSM8K-v0, not {member.id!r}."
        )
    weight = member.weight
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (is_number and math.isfinite(weight) and weight > 0):
        raise ConfigurationError(
            f"{place}: weight must be a number above 0, not {weight!r}. Leave out an environment "
            "that is not to be played."
        )
    for key in ("kwargs", "eval_kwargs"):
        kwargs = getattr(member, key)
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise ConfigurationError(
                f"{place}: {key} must be arguments by name, such as {{hops: 2}}, not {kwargs!r}."
            )
    if member.name != "" and not (isinstance(member.name, str) and NAME.fullmatch(member.name)):
        raise ConfigurationError(
            f"{place}: name must be letters, digits and . , = + - _ (at most 80), not "
            f"{member.name!r}."
        )
    _check_tasks(member.tasks, place)


def _check_tasks(tasks: Any, place: str) -> None:
    if tasks is None:
        return
    is_list = isinstance(tasks, Sequence) and not isinstance(tasks, str) and len(tasks) > 0
    if not is_list or not all(type(task) is int and task >= 0 for task in tasks):
        raise ConfigurationError(
            f"{place}: tasks must be indices of tasks, such as [0, 1, 2], not {tasks!r}."
        )
    # one that came twice could be trained on and held out
    if twice := [task for task, count in Counter(tasks).items() if count > 1]:
        raise ConfigurationError(f"{place}: tasks names task {twice[0]} more than once.")
