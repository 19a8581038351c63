# ruff: noqa: INP001 - mkdocs loads it by its path
"""Docstrings put an indented example after ``::``; Markdown gets a block of code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<before>.*)::\n\n(?P<code>(?: {4}.*\n|\n)+)", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Makes a fenced block of each example."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class or function that was just read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fence, obj.docstring.value + "\n").rstrip()


def _fence(match: re.Match[str]) -> str:
    code = "\n".join(line.removeprefix("    ") for line in match["code"].strip("\n").splitlines())
    before = f"{match['before']}:\n\n" if match["before"].strip() else ""
    return f"{before}```python\n{code}\n```\n\n"
