"""Tests on one side, the program under test on the other, and only values in between.

The tests run in a sandbox of their own. A function of the program is a stand-in (`remote`) there:
calling it sends the arguments to the program's sandbox (`served`), and what comes back is decoded
as plain data. So the comparisons happen where no line of the program ever runs, and there is
nothing to forge: no token to read, no assert to patch, no exit code to set. Runs inside: standard
library only.
"""

import ast
import builtins
import functools
import importlib
import json
import linecache
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from agent_envs.sandbox.remote import Client, Made, ProgramGoneError
from agent_envs.sandbox.values import Channel, keep_nonfinite

_TEST_MODULES: Final = ("collections", "itertools", "math", "random", "re", "string", "sys")


def run_tests(source: str, channel: Channel, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run tests against the program at the other end.

    Args:
        source: JSON: ``tests``; ``names``, what the program provides (None: all that the tests use
            and do not define); ``helpers``, trusted Python that defines what else they use.
        channel: The way to the program.
        namespace: Where to run the tests.

    Returns:
        ``{"passed": bool, "reason": str, "message": str}``.
    """
    client = Client(channel)
    request = json.loads(source)
    lines = request["tests"].splitlines(keepends=True)
    linecache.cache["tests.py"] = (len(request["tests"]), None, lines, "tests.py")
    try:
        _provide(request, client, namespace)
        exec(compile(request["tests"], "tests.py", "exec"), namespace)  # noqa: S102 - the tests
    except ProgramGoneError as error:
        return _verdict("exited", f"the program ended before the tests did ({error})")
    except BaseException as error:  # noqa: BLE001 - the tests; reported as the verdict
        if client.is_broken:
            return _verdict("exited", "the program ended before the tests did")
        return _verdict("failed", _explain(error))
    if client.is_broken:
        return _verdict("exited", "the program ended before the tests did")
    return _verdict("passed", "")


def _provide(request: dict[str, Any], client: Client, namespace: dict[str, Any]) -> None:
    """Put there what the tests use: common modules, helpers, and what the program defines."""
    # Programs often import what their tests then use. The program's "module" could be
    # anything, so the tests get the real one.
    namespace.update((name, importlib.import_module(name)) for name in _TEST_MODULES)
    for name, function in list(vars(math).items()):
        if callable(function):  # `fabs` and its like make a plain float of what is not a number
            setattr(math, name, _keeping_nonfinite(function))
    free = free_names(ast.parse(request["tests"], "tests.py"))
    names = free if request["names"] is None else request["names"]
    helpers = compile(request["helpers"], "helpers.py", "exec")
    if others := set(free).difference(names).intersection(helpers.co_names):
        defined: dict[str, Any] = {"__name__": "helpers"}
        exec(helpers, defined)  # noqa: S102 - trusted
        namespace.update((name, defined[name]) for name in others if name in defined)
        for value in defined.values():
            if isinstance(value, type) and value.__module__ == "helpers":
                _record_making(value, client)
    for name in names:
        is_there, value = client.get(name)
        if is_there:
            namespace[name] = value


def _keeping_nonfinite(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **keywords: keep_nonfinite(function(*arguments, **keywords))


def _record_making(kind: type, client: Client) -> None:
    """Remember of each object of a class how it is made, so that the program can be given it."""
    initialise = kind.__init__  # type: ignore[misc] # the class's own, to be called as it is

    @functools.wraps(initialise)
    def remember(value: Any, *arguments: Any, **keywords: Any) -> None:
        initialise(value, *arguments, **keywords)
        if type(value) is kind:
            client.made[id(value)] = Made(value, arguments, keywords)

    kind.__init__ = remember  # type: ignore[misc]


def free_names(tree: ast.Module) -> list[str]:
    """Return the names that tests use and neither define nor have from Python."""
    nodes = list(ast.walk(tree))
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name for node in nodes if isinstance(node, kinds)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    return sorted(used - defined - set(sys.stdlib_module_names) - set(dir(builtins)))


def _verdict(reason: str, message: str) -> dict[str, Any]:
    return {"passed": reason == "passed", "reason": reason, "message": message}


def _explain(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    at = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"
    ]
    where = f"line {at[-1].lineno}, {at[-1].line}: " if at else ""
    return (where + lines[-1].strip())[:2000]
