"""What the package ``bfcl-eval`` holds: questions, function documents and ground truth.

Read from its files, since the modules that read them import the handlers of a hundred models and
make folders beside the package.
"""

import functools
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError, DataError

_NON_LIVE: Final = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel",
    "parallel_multiple", "irrelevance",
)  # fmt: skip
_LIVE: Final = (
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
    "live_irrelevance", "live_relevance",
)  # fmt: skip
_MULTI_TURN: Final = (
    "multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context",
)  # fmt: skip
CATEGORIES: Final[Mapping[str, tuple[str, ...]]] = {
    "all": (*_NON_LIVE, *_LIVE, *_MULTI_TURN),
    "single_turn": (*_NON_LIVE, *_LIVE),
    "non_live": _NON_LIVE,
    "live": _LIVE,
    "multi_turn": _MULTI_TURN,
    **{name: (name,) for name in (*_NON_LIVE, *_LIVE, *_MULTI_TURN)},
}
"""Categories, and the groups that the package itself names; what needs the network is left out."""
_DOCUMENT_FILES: Final[Mapping[str, str]] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}

Document = dict[str, Any]
"""A function as the package describes it: ``name``, ``description``, ``parameters``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One task of the benchmark."""

    id: str
    """As the package names it, such as ``multi_turn_base_0``."""
    category: str
    """A key of `CATEGORIES`."""
    turns: tuple[tuple[Mapping[str, str], ...], ...]
    """The messages of each turn of the user; a turn may be empty: see `added`."""
    functions: tuple[Document, ...]
    """What may be called from the start."""
    ground_truth: tuple[Any, ...]
    """Single turn: accepted calls, name -> argument -> values. Several: Python calls, per turn."""
    classes: tuple[str, ...] = ()
    """The back-ends that the functions belong to; of several turns only."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The state in which each back-end starts."""
    added: Mapping[int, tuple[Document, ...]] = field(default_factory=dict)
    """Functions that are there only from a turn on."""

    @property
    def is_multi_turn(self) -> bool:
        """Whether back-ends run the calls, and the user has several turns."""
        return self.category in _MULTI_TURN


def choose_categories(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the categories that names of categories and groups stand for, each once.

    Raises:
        UnknownNameError: If there is no such category.
        ConfigurationError: If there are no names.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    if not wanted:
        raise ConfigurationError(
            "category= is empty. Name at least one, such as 'multi_turn_base'."
        )
    found = (lookup(CATEGORIES, name, kind="BFCL category") for name in wanted)
    return tuple(dict.fromkeys(name for group in found for name in group))


@functools.cache
def read_category(category: str) -> tuple[Row, ...]:
    """Return the rows of a category.

    Raises:
        DataError: If the installed package holds other data than this module knows.
    """
    answers = _folder() / "possible_answer" / f"BFCL_v4_{category}.json"
    truths: Iterable[Any] = _read(answers) if "relevance" not in category else ()
    by_id = {truth["id"]: truth["ground_truth"] for truth in truths}
    return tuple(
        _make_row(record, category, by_id)
        for record in _read(_folder() / f"BFCL_v4_{category}.json")
    )


def _make_row(record: dict[str, Any], category: str, truths: Mapping[str, Any]) -> Row:
    classes = tuple(record.get("involved_classes", ()))
    documents = list(record.get("function") or ())
    documents += [dict(document) for name in classes for document in _documents(name)]
    late = {
        int(turn): tuple(document for document in documents if document["name"] in names)
        for turn, names in record.get("missed_function", {}).items()
    }
    held_back = {document["name"] for added in late.values() for document in added}
    # One row's ground truth calls a function before the user has it: there it is offered at once.
    for turn, calls in enumerate(truths.get(record["id"], ())) if late else ():
        held_back -= {call.partition("(")[0].strip() for call in calls if turn < min(late)}
    late = {
        turn: tuple(document for document in added if document["name"] in held_back)
        for turn, added in late.items()
    }
    return Row(
        id=record["id"],
        category=category,
        turns=tuple(map(tuple, record["question"])),
        functions=tuple(d for d in documents if d["name"] not in held_back),
        ground_truth=tuple(truths.get(record["id"], ())),
        classes=classes,
        configuration=record.get("initial_config", {}),
        added=late,
    )


@functools.cache
def _documents(class_name: str) -> tuple[Document, ...]:
    name = lookup(_DOCUMENT_FILES, class_name, kind="BFCL back-end")
    return tuple(_read(_folder() / "multi_turn_func_doc" / f"{name}.json"))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        # Not `read_records`: these files are JSON Lines under the name .json.
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Install the version of bfcl-eval that the extra "
            "'bfcl' names."
        ) from None


@functools.cache
def _folder() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None  # noqa: S101 - the environment has checked it
    assert spec.origin is not None  # noqa: S101
    return Path(spec.origin).parent / "data"
