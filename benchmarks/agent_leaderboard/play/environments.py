"""Making the environments of a run, and the data files behind their tasks.

Configurations are the user's own and may name any environment. Manifests may come from strangers:
`recorded_environment` is the only place where one becomes an environment, and it makes nothing that
is not on the allowlist. So no manifest can read a file outside the data folder, reach a server, run
a program outside the sandbox, or take for ever.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import gymnasium as gym

from agent_envs.core.contexts import CONTEXTS
from agent_envs.core.lookup import lookup
from agent_envs.core.result_edits import ATTACKERS
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_leaderboard.agents.agent import MakeEnv
from agent_leaderboard.records.manifest import EnvironmentRecord
from agent_leaderboard.records.sealing import Seal, data_seal

Check = Callable[[Any], bool]
DATA_PLACEHOLDER: Final = "${data}"
_NAME: Final = re.compile(r"[\w .-]{1,80}", re.ASCII)
_MAX_ITEMS: Final = 64
DATA_PACKAGES: Final = {
    "AgentR1/BFCL-v0": ("bfcl_eval", "data/possible_answer/BFCL_v4_*.json"),
    "AgentR1/ScienceWorld-v0": ("scienceworld", "scienceworld.jar"),
}
"""Environments whose tasks are in a package: its name, and the files with the answers."""
_PACKAGE_MARK: Final = "package:"


def configured_environment(
    record: EnvironmentRecord, tool_format: str | None, data: Path | None
) -> MakeEnv:
    """Return a factory of an environment of the user's own configuration."""
    kwargs = fill_in(record.kwargs, data)
    if tool_format is not None:
        kwargs["tool_format"] = tool_format
    return functools.partial(gym.make, record.id, **kwargs)


def recorded_environment(
    record: EnvironmentRecord, tool_format: str | None, data: Path | None
) -> MakeEnv:
    """Return a factory of an environment of a manifest, if it is on the allowlist."""
    for problem in refused_arguments(record.id, record.kwargs):
        raise DataError(problem)
    return configured_environment(record, tool_format, data)


def fill_in(value: Any, data: Path | None) -> Any:
    """Replace ``${data}`` by the data folder in nested JSON; refuse other placeholders."""
    if isinstance(value, Mapping):
        return {key: fill_in(item, data) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill_in(item, data) for item in value]
    for placeholder in re.findall(r"\$\{[^}]*\}", value) if isinstance(value, str) else ():
        lookup({DATA_PLACEHOLDER: None}, placeholder, kind="placeholder")
        if data is None:
            raise ConfigurationError(
                f"{value}: pass --data with the folder of the data, or set AGENT_R1_DATA."
            )
        value = value.replace(placeholder, str(data))
    return value


# The allowlist


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value is None or (is_number and low <= value <= high)  # False for NaN

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
    """Accept one value, or a short list of values."""

    def each(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return len(value) <= _MAX_ITEMS and all(map(check, value))
        return check(value)

    return each


def _table(check: Check) -> Check:
    def each(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return value is None
        return len(value) <= _MAX_ITEMS and all(_name(k) and check(v) for k, v in value.items())

    return each


def _context(value: Any) -> bool:
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    return _one_of(*CONTEXTS)(options.pop("name", None)) and _table(_plain)(options)


def _plain(value: Any) -> bool:
    return _flag(value) or _name(value) or _number(-10_000, 10_000)(value)


def _attack(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"attacker", "budget"}
        and _one_of(*ATTACKERS)(value.get("attacker", "swap"))
        and _number(0, 1_000)(value.get("budget"))
    )


ENVIRONMENTS: Final = (
    "HotpotQA", "2WikiMultihopQA", "MuSiQue", "Bamboogle", "NaturalQuestions", "TriviaQA", "PopQA",
    "GSM8K", "MATH", "HumanEval", "MBPP", "CommandLine", "ReasoningGym", "TextWorld", "ALFWorld",
    "ScienceWorld", "BFCL", "SyntheticMultiHop", "SyntheticLongHorizon", "SyntheticArithmetic",
    "SyntheticTable",
)  # fmt: skip
"""Names of the allowed environments."""
ARGUMENTS: Final[Mapping[str, Check]] = {
    "attack": _attack,
    "category": _some(_name),
    "context": _context,
    "corpus": _some(_file),
    "data": _some(_file),
    "difficulty": _some(_number(1, 10)),
    "game": _some(_file),
    "hops": _some(_number(1, 8)),
    "kinds": _some(_name),
    "max_episode_steps": _number(1, 1_000),
    "objects": _number(1, 20),
    "optional_tools": _some(_name),
    "outdated": _number(0, 10),
    "parallel_calls": _flag,
    "quest_length": _number(1, 8),
    "questions": _some(_number(1, 20)),
    "retriever": _one_of("auto", "bm25"),
    "rewards": _table(_number(-100, 100)),
    "rooms": _number(1, 12),
    "sandbox": _one_of("strong", "container"),
    "simplifications": _some(_name),
    "split": _name,
    "start": _some(_name),
    "steps": _some(_number(1, 20)),
    "system_prompt": lambda value: isinstance(value, str) and len(value) <= 10_000,
    "task": _some(_name),
    "task_kwargs": _table(_number(-1_000, 1_000)),
    "tool_format": _one_of(*TOOL_FORMATS),
    "top_k": _some(_number(1, 100)),
    "unanswerable": _flag,
    "variant": _some(_name),
    "variations": _some(_number(0, 10_000)),
}
"""Allowed arguments; an environment itself refuses those of others."""


def refused_arguments(id: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a manifest asks for that is not on the allowlist."""
    name = re.sub(r"^AgentR1/(\w+)-v\d+$", r"\1", id)
    if name not in ENVIRONMENTS or name == id:
        yield f"field 'id': {id!r} is not allowed; choose among {', '.join(ENVIRONMENTS)}"
        return
    for key, value in kwargs.items():
        if key not in ARGUMENTS:
            yield f"field 'kwargs': the argument {key!r} is not allowed"
        elif not ARGUMENTS[key](value):
            yield f"field 'kwargs': {key} = {shown(value)} is not allowed"


def shown(value: Any) -> str:
    """Format an untrusted value for a message: one short line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


# Data files


def reads_data(environment: EnvironmentRecord) -> bool:
    """Return whether tasks come from files, so that text about them is sealed."""
    return environment.id in DATA_PACKAGES or bool(_named(environment.kwargs))


def missing_data(environment: EnvironmentRecord, data: Path | None) -> str:
    """Return the first missing file or folder of the data folder, or an empty string."""
    names = sorted(_named(environment.kwargs))
    return next((n for n in names if data is None or not (data / n).exists()), "")


def data_files(environment: EnvironmentRecord, data: Path | None) -> list[str]:
    """Return the name of each data file, sorted; none of a package that is not installed."""
    found = set()
    for name in _named(environment.kwargs):
        path = data_path(name, data)
        for file in path.rglob("*") if path.is_dir() else [path]:
            if not file.is_dir():
                found.add(file.relative_to(data or "").as_posix())
    if environment.id in DATA_PACKAGES:
        package, pattern = DATA_PACKAGES[environment.id]
        if (root := _package_folder(package)) is not None:
            names = (file.relative_to(root).as_posix() for file in root.glob(pattern))
            found |= {f"{_PACKAGE_MARK}{package}/{name}" for name in names}
    return sorted(found)


def data_path(name: str, data: Path | None) -> Path:
    """Return the path of a file that `data_files` names."""
    for package, _ in DATA_PACKAGES.values():
        if name.startswith(start := f"{_PACKAGE_MARK}{package}/"):
            return (_package_folder(package) or Path()) / name.removeprefix(start)
    return (data or Path()) / name


def environment_seal(record: EnvironmentRecord, data: Path | None) -> Seal:
    """Return the seal of an environment's text, by the bytes of its data files."""
    if record.is_text_public:
        return Seal()
    return _seal(tuple(data_path(file.name, data) for file in record.data))


@functools.lru_cache
def _seal(paths: tuple[Path, ...]) -> Seal:
    return data_seal(paths)


def _named(kwargs: Mapping[str, Any]) -> set[str]:
    """Return the names below the data folder in nested arguments."""
    text = json.dumps(kwargs, ensure_ascii=False, default=str)
    return set(re.findall(r'"\$\{data\}/?([^"]*)"', text))


def _package_folder(package: str) -> Path | None:
    """Return the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
