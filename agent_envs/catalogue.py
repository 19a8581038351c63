"""A page of all environments, generated from the declarations of their classes."""

import inspect
import itertools
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, Final

from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_envs.core.rewards import earnings_of
from agent_envs.core.tool_env import ToolEnv
from agent_envs.data.dataset_env import DatasetEnv
from agent_envs.registration import ENVIRONMENTS

TITLE: Final = "# The environments"
INTRODUCTION: Final = (
    "Made by `python -m agent_envs list > ENVIRONMENTS.md`. All take `tools`, "
    "`tool_format`, `parallel_calls`, `context`, `rewards`, `attack`, `system_prompt`, "
    "`render_mode` and `max_episode_steps` "
    "in addition to their own arguments. Reward terms are listed with their default weights; those "
    "without one are off unless `rewards=` names them. Outcome terms are marked with an asterisk. "
    "The return of an episode lies in the stated range: of those that solve their task, the "
    "shortest has the highest return, as has any other without a mistake."
)


def make_page() -> str:
    """Return the page in Markdown."""
    return "\n\n".join([TITLE, INTRODUCTION, *map(make_section, ENVIRONMENTS)]) + "\n"


def make_section(spec: EnvSpec) -> str:
    """Return the section of one environment."""
    kind: Any = load_env_creator(str(spec.entry_point))
    facts = "\n".join(f"- {name}: {text}" for name, text in _facts(kind, spec).items() if text)
    return "\n\n".join([f"## `{spec.id}`", *_paragraphs(inspect.getdoc(kind) or ""), facts])


def _facts(kind: type[ToolEnv], spec: EnvSpec) -> dict[str, str]:
    """Return the declarations of a class, by heading."""
    weights = kind.default_rewards
    terms = [
        f"`{name}`"
        + r"\*" * (name in kind.outcome_terms)
        + (f" {weights[name]:g}" if name in weights else "")
        for name in kind.reward_functions
    ]
    return {
        "Data": _data(kind),
        "Rows": kind.dataset.form if issubclass(kind, DatasetEnv) else "",
        "Tools": _list(kind.tool_signatures) or "none",
        "Tools by name": _list(kind.optional_tool_names),
        "Reward terms": ", ".join(terms),
        "Solving earns": _range(kind, spec, solved=True),
        "Not solving earns": _range(kind, spec, solved=False),
        "Metrics": _list(kind.metric_names),
        "Arguments": _arguments(kind),
        "Turns": str(spec.max_episode_steps),
        "Fixed arguments": _list(f"{name}={value!r}" for name, value in spec.kwargs.items()),
    }


def _range(kind: type[ToolEnv], spec: EnvSpec, *, solved: bool) -> str:
    """Return the range of the return with the default rewards."""
    earnings = kind.earnings(**spec.kwargs)
    least, most = earnings_of(kind.default_rewards, earnings, solved=solved)
    if least == most:
        return f"{most:g}"
    is_open = most < float(f"{most:g}") < most + 1e-12  # a score just below the full one
    return f"{least:g} to {'less than ' * is_open}{most:g}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _paragraphs(docstring: str) -> Iterator[str]:
    for paragraph in docstring.split("\n\n"):
        yield "\n".join(textwrap.wrap(paragraph.replace("``", "`"), 118, break_long_words=False))


def _data(kind: type[ToolEnv]) -> str:
    if not issubclass(kind, DatasetEnv) or kind.dataset.hub is None:
        return kind.data_source
    hub = kind.dataset.hub
    place = f"`{hub.path}`, {hub.configuration}" if hub.configuration else f"`{hub.path}`"
    return f"{place} on the hub, split `{hub.split}`, or `data=`; licence: {hub.licence}"


def _arguments(kind: type[ToolEnv]) -> str:
    """Return the arguments of a class and its bases, with their defaults."""
    found: dict[str, str] = {}
    for base in itertools.takewhile(lambda base: base is not ToolEnv, kind.__mro__):
        for parameter in inspect.signature(base).parameters.values():
            if "__init__" in vars(base) and parameter.kind is parameter.KEYWORD_ONLY:
                found.setdefault(parameter.name, f"`{parameter.name}={parameter.default!r}`")
    return ", ".join(found.values())
