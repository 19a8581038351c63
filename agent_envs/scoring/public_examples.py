"""Examples in the docstring of a task, as public tests."""

import ast
import doctest
import re
import warnings
from collections.abc import Iterator
from typing import Final

_ARROW: Final = re.compile(r"\s*(?:==>|=>|==|->|➞|→|=|should return|returns)\s*")


def public_examples(prompt: str, entry_point: str) -> tuple[str, ...]:
    """Return an assertion for each example in a function's docstring, in order.

    Doctests, and lines such as ``f(1) == 2`` or ``f([1]) => 2``, if both sides are plain Python.
    `prompt` is a program that ends with the function's signature and docstring.
    """
    text = _docstring(prompt, entry_point)
    found = [*_doctests(text), *_lines(text, entry_point)]
    return tuple(dict.fromkeys(f"assert {call} == {value}" for call, value in found))


def parse_quietly(source: str) -> ast.Module:
    """Parse a program without warnings about it.

    Raises:
        SyntaxError: If it is no Python.
        ValueError: If it holds a null character.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _docstring(prompt: str, entry_point: str) -> str:
    r"""Return the source text of a function's docstring, with its escapes such as ``\n``."""
    source = prompt.rstrip() + "\n    pass\n"
    try:
        nodes = list(ast.walk(parse_quietly(source)))
    except (SyntaxError, ValueError):
        return prompt
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            written = ast.get_source_segment(source, node.body[0]) or ""
            return written.strip("\"'ru") if ast.get_docstring(node) else ""
    return prompt


def _doctests(text: str) -> Iterator[tuple[str, str]]:
    try:
        examples = doctest.DocTestParser().get_examples(text)
    except ValueError:  # a malformed doctest somewhere
        return
    for example in examples:
        call, value = example.source.strip(), example.want.strip()
        if value and _is_call(call) and _is_literal(value):
            yield call, value


def _lines(text: str, entry_point: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        start = line.find(f"{entry_point}(")
        if start < 0 or line.lstrip().startswith(("def ", ">>>")):
            continue
        ends = (match.end() for match in re.finditer(r"\)", line))
        if end := next((end for end in ends if _is_call(line[start:end])), 0):
            arrow = _ARROW.match(line, end)
            if arrow and (value := _literal(line[arrow.end() :])):
                yield line[start:end], value


def _literal(text: str) -> str | None:
    """Return the literal at the start of a text; None if there is none."""
    text = text.strip()
    candidates = (text.split("#")[0].strip(), text, text.rstrip(".,;"))
    return next((each for each in candidates if each and _is_literal(each)), None)


def _is_call(text: str) -> bool:
    """Return whether a text is a call with nothing but literals in it."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return isinstance(call, ast.Call) and all(
        map(_is_literal, [*call.args, *(keyword.value for keyword in call.keywords)])
    )


def _is_literal(value: str | ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
