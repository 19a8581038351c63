"""Tasks of the package ``bfcl-eval``: questions, functions as tools, and ground truth.

Read from its files, since the package's own readers import the handlers of a hundred models.
"""

import functools
import importlib.util
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.core.tool import ForeignTool, ToolResult
from agent_envs.data.records import read_records

LANGUAGES: Final[Mapping[str, str]] = {"simple_java": "Java", "simple_javascript": "JavaScript"}
MAX_RESULT_CHARS: Final = 200_000
"""The category ``multi_turn_long_context`` has long results."""
_HINTS: Final[Mapping[str | None, str]] = {
    "Java": " Note that the provided function is in Java 8 SDK syntax.",
    "JavaScript": " Note that the provided function is in JavaScript syntax.",
    None: " Note that the provided function is in Python 3 syntax.",
}
Document = dict[str, Any]
"""The package's description of a function: ``name``, ``description``, ``parameters``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One task of the benchmark."""

    id: str
    category: str
    turns: tuple[tuple[Mapping[str, str], ...], ...]
    """The messages of each user turn; a turn may be empty: see `added`."""
    functions: tuple[Document, ...]
    """Functions that are available from the start."""
    ground_truth: tuple[Any, ...]
    """Single turn: accepted calls, name -> argument -> values. Several: Python calls, per turn."""
    classes: tuple[str, ...] = ()
    """The back-ends of the functions; only with several turns."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The initial state of each back-end."""
    added: Mapping[int, tuple[Document, ...]] = field(default_factory=dict)
    """Functions that are available only from a turn on."""

    @property
    def is_multi_turn(self) -> bool:
        """Whether back-ends run the calls, and the user has several turns."""
        return bool(self.classes)


@functools.cache
def categories() -> Mapping[str, tuple[str, ...]]:
    """Return categories by name, and the package's groups, without those that need the network."""
    from bfcl_eval.constants.category_mapping import TEST_COLLECTION_MAPPING

    names = ("single_turn", "non_live", "live", "multi_turn")
    groups = {name: tuple(TEST_COLLECTION_MAPPING[name]) for name in names}
    groups["all"] = groups["single_turn"] + groups["multi_turn"]
    return groups | {name: (name,) for name in groups["all"]}


def choose_categories(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the categories of names of categories and groups, each once."""
    wanted = (names,) if isinstance(names, str) else tuple(names)
    found = (lookup(categories(), name, kind="BFCL category") for name in wanted)
    return tuple(dict.fromkeys(name for group in found for name in group))


@functools.cache
def read_category(category: str) -> tuple[Row, ...]:
    """Return the rows of a category."""
    name = f"BFCL_v4_{category}.json"
    truths = _read(f"possible_answer/{name}") if "relevance" not in category else ()
    by_id = {truth["id"]: truth["ground_truth"] for truth in truths}
    return tuple(_make_row(each, category, by_id.get(each["id"], ())) for each in _read(name))


def _make_row(record: dict[str, Any], category: str, ground_truth: Sequence[Any]) -> Row:
    classes = tuple(record.get("involved_classes", ()))
    documents = list(record.get("function") or ())
    if classes:
        from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

        files = (MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] for name in classes)
        documents += itertools.chain(*(_read(f"multi_turn_func_doc/{name}") for name in files))
    missed = {int(turn): names for turn, names in record.get("missed_function", {}).items()}
    late = {name for names in missed.values() for name in names}
    # One row's ground truth calls a function before the user adds it; it is available at once.
    for turn, calls in enumerate(ground_truth) if missed else ():
        late -= {call.partition("(")[0].strip() for call in calls if turn < min(missed)}
    return Row(
        id=record["id"],
        category=category,
        turns=tuple(map(tuple, record["question"])),
        functions=tuple(d for d in documents if d["name"] not in late),
        ground_truth=tuple(ground_truth),
        classes=classes,
        configuration=record.get("initial_config", {}),
        added={
            turn: tuple(d for d in documents if d["name"] in names and d["name"] in late)
            for turn, names in missed.items()
        },
    )


@functools.cache
def _read(name: str) -> tuple[dict[str, Any], ...]:
    """Read a file of the package, which has JSON Lines under the name .json."""
    spec = importlib.util.find_spec("bfcl_eval")
    path = Path(getattr(spec, "origin", None) or "").parent / "data" / name
    return tuple(read_records(path, has_lines=True))


def make_tools(
    documents: tuple[Document, ...], row: Row, run: Callable[[str, Mapping[str, Any]], ToolResult]
) -> list[ForeignTool]:
    """Return the tools of the documents of a row; `run` takes the package's name and arguments."""
    language = LANGUAGES.get(row.category)
    return [
        ForeignTool(
            tool_name(document["name"]), document["description"] + _HINTS[language],
            _schema(document["parameters"], language),
            functools.partial(run, document["name"]), max_result_chars=MAX_RESULT_CHARS,
        )
        for document in documents
    ]  # fmt: skip


def tool_name(name: str) -> str:
    """Return a function's name without dots, as models with function calling write it."""
    return name.replace(".", "_")


def _schema(parameters: Mapping[str, Any], language: str | None) -> dict[str, Any]:
    properties = {
        name: _convert(value) if language is None else _as_text(value, language)
        for name, value in parameters.get("properties", {}).items()
    }
    required = list(parameters.get("required", ()))
    return {"type": "object", "properties": properties, "required": required}


def _convert(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with JSON's types, at any depth."""
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

    made = dict(schema)
    made["type"] = GORILLA_TO_OPENAPI.get(str(schema.get("type")), "string")
    if schema.get("type") == "float":
        made["format"] = "float"
        made["description"] = f"{schema.get('description', '')} This is a float type value.".strip()
    if isinstance(properties := schema.get("properties"), dict):
        made["properties"] = {
            name: _convert(value) if isinstance(value, dict) else value
            for name, value in properties.items()
        }
    if isinstance(items := schema.get("items"), dict):
        made["items"] = _convert(items)
    return made


def _as_text(schema: Mapping[str, Any], language: str) -> dict[str, Any]:
    """Return a schema for a value of another language, written in a string."""
    kind = schema["type"]
    about = (
        f"This parameter can be of any type of {language} object in string representation."
        if kind == "any"
        else f"This is {language} {kind} type parameter in string representation."
    )
    description = f"{schema.get('description', '')} {about}"
    if kind in ("ArrayList", "Array", "array") and "items" in schema:
        description += (
            f" The list elements are of type {schema['items']['type']}; they are not in string "
            "representation."
        )
    if kind == "dict" and "properties" in schema:
        description += (
            " The dictionary entries have the following schema; they are not in string "
            f"representation. {json.dumps(schema['properties'])}"
        )
    others = {k: v for k, v in schema.items() if k not in ("items", "properties")}
    return others | {"type": "string", "description": description}
