"""Entries of a list of environments, and the name that each is reported under."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Final

import gymnasium as gym
from pydantic import Field, TypeAdapter, ValidationError

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError

_EXAMPLE: Final = (
    "[{id: AgentR1/SyntheticMultiHop-v0, weight: 2, kwargs: {hops: [1, 2]}}, "
    "{id: AgentR1/SyntheticTable-v0}]"
)
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvMember:
    """One of several environments that a run trains in, or evaluates in."""

    id: str | Callable[[], Any]
    """A Gymnasium id, or a function that makes an environment."""
    name: str = ""
    """Its name in metrics, ``env/<name>/success``; `name_members` derives one by default."""
    weight: float = 1.0
    """Its share of the groups, relative to the others'; more than 0."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    eval_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Those that differ in evaluation."""
    tasks: Sequence[int] | None = None
    """Indices of its tasks; None for all of them."""

    def make_env(self) -> Any:
        """Make one environment."""
        make = self.id if callable(self.id) else lambda **kwargs: gym.make(str(self.id), **kwargs)
        return make(**self.kwargs)

    def as_json(self) -> dict[str, Any]:
        """Return its entry in a settings file, without empty optional fields."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        optional = ("eval_kwargs", "tasks")
        return {k: v for k, v in record.items() if v or k not in optional}


Member = str | Callable[[], Any] | Mapping[str, Any] | EnvMember
_FORMS: Final[Mapping[str, tuple[TypeAdapter[Any], str]]] = {
    "name": (
        TypeAdapter(Annotated[str, Field(pattern=r"\A([A-Za-z0-9_][A-Za-z0-9_.,=+-]{0,79})?\z")]),
        "letters, digits and . , = + - _ (at most 80)",
    ),
    "weight": (
        TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]),
        "a number above 0; leave out an environment that is not to be trained in",
    ),
    "kwargs": (TypeAdapter(dict[str, Any]), "arguments by name, such as {hops: 2}"),
    "eval_kwargs": (TypeAdapter(dict[str, Any]), "arguments by name, such as {hops: 2}"),
    "tasks": (
        TypeAdapter(
            Annotated[list[Annotated[int, Field(ge=0, strict=True)]] | None, Field(min_length=1)]
        ),
        "indices of tasks, such as [0, 1, 2]",
    ),
}
"""Type of each field, and its description in errors."""


def read_members(values: Any, option: str, *, is_weighted: bool = True) -> list[EnvMember]:
    """Read the entries of a list of environments, each an id or ``{id, weight, kwargs, ...}``.

    Args:
        values: The list; an entry may be JSON text, as on a command line.
        option: Its name in errors: ``envs``.
        is_weighted: Whether entries may have a weight and `eval_kwargs`.

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
                f"{option}, entry {i}: weight does nothing, because each environment is evaluated "
                f"separately. Leave it out: {value!r}"
            )
        if not is_weighted and member.eval_kwargs:
            raise ConfigurationError(
                f"{option}, entry {i}: the environment is only evaluated. Write kwargs instead of "
                f"eval_kwargs: {value!r}"
            )
    return members


def name_members(
    trained: Sequence[EnvMember], variants: Sequence[EnvMember] = ()
) -> tuple[list[EnvMember], list[EnvMember]]:
    """Give every environment of a run a unique name.

    A derived name is the id without its namespace, followed where necessary by the arguments in
    which environments of that id differ: ``Name-v0,hops=3``. A variant that equals an environment
    of `trained` is left out, unless it lists tasks or has a name.

    Raises:
        ConfigurationError: If two have the same name, or are the same and have none.
    """
    named = _with_names(trained, [member for member in trained if not member.name])
    evaluated = [(m.id, {**m.kwargs, **m.eval_kwargs}) for m in trained]
    others = [
        variant
        for variant in variants
        if variant.name
        or variant.tasks is not None
        or (variant.id, dict(variant.kwargs)) not in evaluated
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
                f"Two environments of the run have the name {name!r}. Name them: "
                f"{{id: {member.id}, name: ..., kwargs: ...}}; or, if they are the same, write one "
                "entry with the sum of their weights."
            )
        named.append(replace(member, name=name))
    return named


def _derived(member: EnvMember, relatives: Sequence[EnvMember]) -> str:
    """Return a name of the id and the arguments in which it differs from `relatives`."""
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
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{place} is not valid JSON ({error}): {value}") from None
    if isinstance(value, EnvMember):
        member = value
    elif isinstance(value, Mapping):
        for key in value:
            known = dict.fromkeys(entry.name for entry in fields(EnvMember))
            lookup(known, key, kind=f"field of an environment ({place})")
        if "id" not in value:
            raise ConfigurationError(
                f"{place}: 'id' is missing (found: {', '.join(value) or 'nothing'}). Such as "
                f"{_EXAMPLE}"
            )
        # a key without a value is None in YAML
        member = EnvMember(**{key: item for key, item in value.items() if item is not None})
    elif isinstance(value, str) or callable(value):
        member = EnvMember(id=value)
    else:
        raise ConfigurationError(
            f"{place} must be an id or {{id: ..., weight: ..., kwargs: ...}}, not {value!r}."
        )
    _check(member, place)
    return member


def _check(member: EnvMember, place: str) -> None:
    if not callable(member.id) and not (isinstance(member.id, str) and member.id):
        raise ConfigurationError(
            f"{place}: id must be a Gymnasium id such as AgentR1/GSM8K-v0, not {member.id!r}."
        )
    for name, (type_, form) in _FORMS.items():
        value = getattr(member, name)
        try:
            type_.validate_python(list(value) if isinstance(value, range | tuple) else value)
        except ValidationError:
            raise ConfigurationError(f"{place}: {name} must be {form}, not {value!r}.") from None
    tasks = list(member.tasks or ())
    if len(set(tasks)) < len(tasks):  # a duplicate could be trained on and held out
        twice = next(task for task in tasks if tasks.count(task) > 1)
        raise ConfigurationError(f"{place}: tasks lists task {twice} more than once.")
