# ruff: noqa: INP001 - mkdocs loads it by its path
"""Docstrings say ``::`` before an example; Markdown would show both colons."""

import re
from typing import Any

import griffe


class OneColon(griffe.Extension):
    """Turns ``::`` at the end of a line into ``:``, or drops it on a line of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class or function that was just read."""
        if obj.docstring is not None:
            text = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
