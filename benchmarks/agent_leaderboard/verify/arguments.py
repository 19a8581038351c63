"""What a run of others may make an environment of: a list of arguments for each id.

A manifest is somebody else's file, and making an environment of it must read no file but the data
sets', reach no server, run no program outside the sandbox, and end. So arguments are taken from
this list only, within bounds; environments that are played on a server are not on it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from agent_envs.core.contexts import CONTEXTS
from agent_envs.core.result_edits import ATTACKERS
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.retrieval.bm25 import RETRIEVERS
from agent_leaderboard.play.config import DATA_PLACEHOLDER

Check = Callable[[Any], bool]
_NAME: Final = re.compile(r"[\w .-]{1,80}", re.ASCII)
MAX_ITEMS: Final = 64


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value is None or (is_number and low <= value <= high)  # of NaN neither holds

    return check


def _one_of(*names: str) -> Check:
    return lambda value: isinstance(value, str) and value in names


def _name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and _NAME.fullmatch(value) is not None)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _file(value: Any) -> bool:
    if not isinstance(value, str) or not value.startswith(f"{DATA_PLACEHOLDER}/"):
        return False
    name = value.removeprefix(f"{DATA_PLACEHOLDER}/")
    path = PurePosixPath(name)
    is_plain = str(path) == name and path.parts and not path.is_absolute()
    return bool(is_plain) and ".." not in path.parts and not set("\\$\0") & set(name)


def _some(check: Check) -> Check:
    """Return what holds of one value, or of each of a short list."""

    def each(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return len(value) <= MAX_ITEMS and all(map(check, value))
        return check(value)

    return each


def _table(check: Check) -> Check:
    def each(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return value is None
        return len(value) <= MAX_ITEMS and all(_name(k) and check(v) for k, v in value.items())

    return each


def _context(value: Any) -> bool:
    options = value if isinstance(value, Mapping) else {"name": value}
    plain = {key: option for key, option in options.items() if key != "name"}
    return _one_of(*CONTEXTS)(options.get("name")) and _table(_plain)(plain)


def _attack(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"attacker", "budget"}
        and _one_of(*ATTACKERS)(value.get("attacker", "swap"))
        and _number(0, 1_000)(value.get("budget"))
    )


def _plain(value: Any) -> bool:
    return _flag(value) or _name(value) or _number(-10_000, 10_000)(value)


_OF_ALL: Final[dict[str, Check]] = {
    "tool_format": _one_of(*TOOL_FORMATS),
    "context": _context,
    "attack": _attack,
    "rewards": _table(_number(-100, 100)),
    "parallel_calls": _flag,
    "optional_tools": _some(_name),
    "system_prompt": lambda value: isinstance(value, str) and len(value) <= 10_000,
    "max_episode_steps": _number(1, 1_000),
    "split": _name,
}
_SANDBOX: Final[dict[str, Check]] = {"sandbox": _one_of("strong", "container")}
_DATA: Final[dict[str, Check]] = {"data": _some(_file)}
_QUESTIONS: Final[dict[str, Check]] = _DATA | {
    "corpus": _some(_file),
    "top_k": _number(1, 100),
    "retriever": _one_of("auto", *RETRIEVERS),
    "variant": _name,
}
_WORLD: Final[dict[str, Check]] = {
    "hops": _some(_number(1, 8)),
    "start": _some(_name),
    "variant": _some(_name),
    "top_k": _some(_number(1, 50)),
    "questions": _some(_number(1, 20)),
    "outdated": _number(0, 10),
    "max_searches": _number(1, 1_000),
}
_CHAIN: Final[dict[str, Check]] = {"steps": _some(_number(1, 20))}
_GAME: Final[dict[str, Check]] = {
    "rooms": _number(1, 12),
    "objects": _number(1, 20),
    "quest_length": _number(1, 8),
}

ARGUMENTS: Final[Mapping[str, Mapping[str, Check]]] = {
    "HotpotQA": _QUESTIONS,
    "2WikiMultihopQA": _QUESTIONS | {"aliases": _file},
    "MuSiQue": _QUESTIONS | {"unanswerable": _flag},
    "Bamboogle": _QUESTIONS,
    "NaturalQuestions": _QUESTIONS,
    "TriviaQA": _QUESTIONS,
    "PopQA": _QUESTIONS,
    "GSM8K": _DATA | _SANDBOX,
    "MATH": _DATA | _SANDBOX | {"levels": _some(_plain), "subjects": _some(_name)},
    "HumanEval": _DATA | _SANDBOX,
    "MBPP": _DATA | _SANDBOX,
    "CommandLine": _SANDBOX | {"kinds": _some(_name), "difficulty": _some(_number(1, 10))},
    "ReasoningGym": {"task": _name, "task_kwargs": _table(_number(-1_000, 1_000))},
    "TextWorld": _GAME | {"game": _some(_file)},
    "ALFWorld": {"data": _file, "kinds": _some(_name)},
    "ScienceWorld": {
        "task": _some(_name),
        "variations": _some(_number(0, 10_000)),
        "simplifications": _some(_name),
    },
    "BFCL": {"category": _some(_name)},
    "SyntheticMultiHop": _WORLD,
    "SyntheticLongHorizon": _WORLD,
    "SyntheticArithmetic": _CHAIN,
    "SyntheticTable": _CHAIN,
}
"""Arguments by the id's name, besides those of all environments."""


def check_arguments(id: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a manifest of others must not make this machine do."""
    name = re.sub(r"^AgentR1/(\w+)-v\d+$", r"\1", id)
    if name not in ARGUMENTS or name == id:
        yield (
            f"field 'id': {id!r} is not played for others; those that are: {', '.join(ARGUMENTS)}"
        )
        return
    allowed = {**_OF_ALL, **ARGUMENTS[name]}
    for key, value in kwargs.items():
        if key not in allowed:
            yield f"field 'kwargs': {key!r} is no argument that is taken from others"
        elif not allowed[key](value):
            yield f"field 'kwargs': {key} = {shown(value)} is no value that is taken from others"


def shown(value: Any) -> str:
    """Return a value of others as messages show it: one line, not long."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
