"""Right plays of BFCL, made from its ground truth."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agent_envs.envs.functions.bfcl_back_ends import named_arguments, read_call
from agent_envs.envs.functions.bfcl_checks import Call, is_right_turn
from agent_envs.envs.functions.bfcl_rows import Document, Row
from agent_envs.envs.functions.function_documents import LANGUAGES

_MAX_TRIES: Final = 200
_ABSENT: Final = object()
_EXAMPLES: Final[Mapping[str, Any]] = {
    "integer": 1, "float": 1.0, "number": 1.0, "boolean": True, "array": [], "tuple": [],
    "dict": {},
}  # fmt: skip


def right_turns(row: Row) -> list[list[Call]]:
    """Return the right calls of each turn of the user; no turn at all where there are none.

    The ground truth of a single turn lists the values that are accepted; the first that the
    official checker accepts are taken.
    """
    if row.is_multi_turn:
        return [[_named(row, text) for text in calls] for calls in row.ground_truth]
    if "irrelevance" in row.category:
        return [[]]
    if "relevance" in row.category:
        return [[_example(row.functions[0])]]
    documents = {document["name"]: document for document in row.functions}
    choices = [
        [(name, arguments) for arguments in _accepted(documents[name], accepted, row.category)]
        for (name, accepted), in (truth.items() for truth in row.ground_truth)
    ]  # fmt: skip
    plays = itertools.islice(_diagonal(choices), _MAX_TRIES)
    return next(([calls] for calls in plays if is_right_turn(row, calls)), [])


def _named(row: Row, text: str) -> Call:
    name, positional, arguments = read_call(text)
    return name, named_arguments(row, name, positional) | arguments


def _example(document: Document) -> Call:
    parameters = document["parameters"]
    properties = parameters.get("properties", {})
    return document["name"], {
        name: _EXAMPLES.get(properties[name].get("type"), "example")
        for name in parameters.get("required", ())
    }


def _diagonal(choices: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield combinations: the first choices, then changes in one place, then all others."""
    first = [options[0] for options in choices]
    yield first
    for place, options in enumerate(choices):
        for option in options[1:]:
            yield [*first[:place], option, *first[place + 1 :]]
    yield from map(list, itertools.product(*choices))


def _accepted(
    document: Document, accepted: Mapping[str, Sequence[Any]], category: str
) -> list[dict[str, Any]]:
    """Return arguments that the ground truth accepts, several ways of writing them."""
    properties = document["parameters"]["properties"]
    language = LANGUAGES.get(category)
    options: dict[str, list[Any]] = {}
    for name, values in accepted.items():
        kind = properties.get(name, {}).get("type", "any")
        written = [_read(value) for value in values if value != ""] or [""]
        if language is not None:
            written = [text for value in written for text in _write(value, kind, language)]
        options[name] = written if "" not in values else [*written, _ABSENT]
    names = list(options)
    plays = itertools.islice(_diagonal(list(options.values())), _MAX_TRIES)
    return [
        {name: value for name, value in zip(names, play, strict=True) if value is not _ABSENT}
        for play in plays
    ]


def _read(value: Any) -> Any:
    """Return a value of which the ground truth lists what each of its members may be."""
    if isinstance(value, dict):
        return {
            key: _read(next(choice for choice in choices if choice != ""))
            for key, choices in value.items()
            if isinstance(choices, list) and any(choice != "" for choice in choices)
        } | {key: choice for key, choice in value.items() if not isinstance(choice, list)}
    return [_read(item) for item in value] if isinstance(value, list) else value


def _write(value: Any, kind: str, language: str) -> list[str]:
    """Return ways to write a value in Java or JavaScript."""
    plain = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, str) or kind in ("String", "any"):
        return [plain, json.dumps(plain)]
    if language == "Java":
        return [plain, *_write_java(value, kind)]
    pairs = value.items() if isinstance(value, dict) else ()
    entries = ", ".join(f"{key}: {json.dumps(entry)}" for key, entry in pairs)
    return [plain + ("n" if kind == "Bigint" else ""), f"{{{entries}}}"]


def _write_java(value: Any, kind: str) -> Iterator[str]:
    yield json.dumps(value) + {"long": "L", "float": "f"}.get(kind, "")
    if isinstance(value, dict):
        entries = " ".join(f"put({json.dumps(k)}, {json.dumps(v)});" for k, v in value.items())
        yield f"new HashMap<String, Object>() {{{{ {entries} }}}}"
    if isinstance(value, list):
        # The package takes the quotes away from some kinds of elements, and leaves them to others.
        for write in (json.dumps, str, "{}L".format):
            items = ", ".join(map(write, value))
            yield f"new ArrayList<>(Arrays.asList({items}))"
            yield f"new String[]{{{items}}}"
