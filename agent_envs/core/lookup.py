"""Look a name up in a table; a wrong name is an error that holds the right one."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from agent_envs.errors import UnknownNameError

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, *, kind: str) -> T:
    """Return ``table[name]``; `kind` is what the table holds, such as ``"advantage estimator"``.

    Raises:
        UnknownNameError: If the table lacks `name`. The message suggests the nearest name and
            lists all of them.
    """
    if name in table:
        return table[name]
    raise UnknownNameError(unknown_name_message(name, table, kind=kind))


def unknown_name_message(name: str, known: Mapping[str, object], *, kind: str) -> str:
    """Say that `name` is unknown, which name is nearest and which names there are."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {name!r}.{hint} Available: {', '.join(sorted(known))}."
