"""Look up names in tables, import paths (``"my_module:my_function"``), and optional libraries.

A wrong name is an error that suggests the nearest one.
"""

import contextlib
import difflib
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from agent_envs.errors import ConfigurationError, MissingExtraError, UnknownNameError

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, *, kind: str) -> T:
    """Return ``table[name]``; `kind` is what the table holds, such as ``"advantage estimator"``."""
    if name in table:
        return table[name]
    close = difflib.get_close_matches(str(name), table, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    known = ", ".join(sorted(table))
    raise UnknownNameError(f"Unknown {kind} {name!r}.{hint} Available: {known}.")


def lookup_or_import(table: Mapping[str, T], name: str, *, kind: str) -> T:
    """Return ``table[name]``, or the object at the import path `name`, ``"module:name"``."""
    if ":" not in name:
        return lookup(table, name, kind=kind)
    try:
        found: T = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # a module's own code may raise anything
        reason = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UnknownNameError(
            f"The {kind} {name!r} cannot be imported: {reason}. Write 'module:name', of a module "
            "that is installed or on PYTHONPATH."
        ) from error
    if not callable(found) and kind != "tool":
        raise UnknownNameError(f"The {kind} {name!r} is no function or class: {found!r:.80}.")
    return found


def import_path(thing: Any, *, kind: str) -> str:
    """Return the import path of a function or class; a ConfigurationError if it has none."""
    path = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    with contextlib.suppress(UnknownNameError):
        if lookup_or_import({}, path, kind=kind) is thing:
            return path
    raise ConfigurationError(
        f"The {kind} {thing!r} has no import path, so no checkpoint and no other process could "
        "name it. Give it a name at the top level of a module, and pass it, or 'module:name'."
    )


def require_extra(extra: str, needed_for: str, *modules: str, also: str = "") -> None:
    """Raise a MissingExtraError if one of the `modules` is missing; `also` ends its message."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        hint = install_hint(extra) + also
        raise MissingExtraError(f"{needed_for} needs {', '.join(missing)}. {hint}")


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, by name and from a checkout."""
    by_name, checkout = f"pip install 'agent-r1[{extra}]'", f"pip install '.[{extra}]'"
    return f"Install with: {by_name}, or in a checkout: {checkout}"
