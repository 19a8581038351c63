"""Tests on one side, the program under test on the other, and only values in between.

The tests run in a sandbox of their own. A function of the program is a `Remote` there: calling it
sends the arguments to the program's sandbox, and what comes back is decoded as plain data. So
the comparisons happen where no line of the program ever runs, and there is nothing to forge: no
token to read, no assert to patch, no exit code to set. Runs inside: standard library only.
"""

import ast
import builtins
import importlib
import linecache
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from agent_envs.sandbox.values import Channel, decode, encode

_WHOLE_OBJECT: Final[dict[str, Callable[..., Any]]] = {
    "bool": bool, "len": len, "iter": iter, "next": next, "str": str, "repr": repr,
    "getattr": getattr, "setattr": setattr, "isinstance": isinstance,
    "eq": lambda a, b: a == b, "hash": hash, "call": lambda f, *a, **k: f(*a, **k),
}  # fmt: skip
_TEST_MODULES: Final = ("collections", "itertools", "math", "random", "re", "string", "sys")
# No arithmetic and no comparisons: `abs(f(x) - 0.5) < 1e-6` would be for the program to decide.
# Nor `in`: Python then iterates, and compares on the tests' side.
_OPERATORS: Final = ("getitem", "setitem", "delitem", "int", "float")


class Server:
    """The program's side: does what the tests ask for."""

    def __init__(self, channel: Channel, namespace: dict[str, Any]) -> None:
        """Offer `namespace` over `channel`."""
        self._channel, self._namespace = channel, namespace
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}

    def serve(self) -> None:
        """Answer until the tests are over."""
        while True:
            try:
                request = self._channel.receive()
            except EOFError:
                return
            self._channel.send(self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "get" in request:
                if request["get"] not in self._namespace:
                    return {"missing": True}
                return {"value": encode(self._namespace[request["get"]], self._refer)}
            arguments, keywords = decode(request["arguments"], self._resolve)
            name = request["do"]
            if name in _WHOLE_OBJECT:
                result = _WHOLE_OBJECT[name](*arguments, **keywords)
            else:
                result = getattr(arguments[0], f"__{name}__")(*arguments[1:])
            return {"value": encode(result, self._refer)}
        except BaseException as error:  # noqa: BLE001 - foreign code; the tests judge it
            return {"error": [type(error).__name__, str(error)]}

    def _refer(self, value: Any) -> Any:
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._handles[id(value)]

    def _resolve(self, reference: Any) -> Any:
        if "handle" in reference:
            return self._objects[reference["handle"]]

        def call_back(*arguments: Any, **keywords: Any) -> Any:
            data = encode((arguments, keywords), self._refer)
            self._channel.send({"callback": reference["function"], "arguments": data})
            answer = self._channel.receive()
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return decode(answer["value"], self._resolve)

        return call_back


class ProgramGoneError(BaseException):
    """The program ended, or sent what is no value; no test may catch it as a mere exception."""


class RemoteError(Exception):
    """The program raised something that is not one of Python's own exceptions."""


class Client:
    """The tests' side."""

    def __init__(self, channel: Channel) -> None:
        """Ask over `channel`."""
        self._channel = channel
        self._remotes: dict[int, Remote] = {}
        self._functions: list[Any] = []
        self.is_broken = False
        """Whether the program went away; it stays so, whatever the tests catch."""

    def get(self, name: str) -> tuple[bool, Any]:
        """Return whether the program has a global `name`, and its value."""
        answer = self._ask({"get": name})
        return "value" in answer, self._value(answer) if "value" in answer else None

    def do(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Have the program apply `operation`.

        Raises:
            Exception: What the program raised, if it is one of Python's own.
            RemoteError: What else the program raised.
        """
        data = encode((arguments, keywords), self._refer)
        answer = self._ask({"do": operation, "arguments": data})
        if "error" in answer:
            raise _as_exception(answer["error"])
        return self._value(answer)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._channel.send(request)
            while True:
                answer = self._channel.receive()
                if not isinstance(answer, dict):
                    raise ValueError("malformed answer")
                if "callback" not in answer:
                    return answer
                self._channel.send(self._call_back(answer))
        except (EOFError, OSError, ValueError, RecursionError, MemoryError) as error:
            raise self._gone(error) from None

    def _value(self, answer: dict[str, Any]) -> Any:
        try:
            return decode(answer["value"], self._resolve)
        except (KeyError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise self._gone(error) from None

    def _gone(self, error: BaseException) -> ProgramGoneError:
        self.is_broken = True
        return ProgramGoneError(str(error))

    def _call_back(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._functions[int(message["callback"])]
            arguments, keywords = decode(message["arguments"], self._resolve)
            return {"value": encode(function(*arguments, **keywords), self._refer)}
        except Exception as error:  # noqa: BLE001 - the tests' function on the program's values
            return {"error": f"{type(error).__name__}: {error}"}

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"handle": object.__getattribute__(value, "_handle")}
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} cannot be passed to the program under test")
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _resolve(self, handle: Any) -> Any:
        if type(handle) is not int:
            raise ValueError("malformed value")
        return self._remotes.setdefault(handle, Remote(self, handle))


class Remote:
    """Stands, on the tests' side, for an object of the program that is not plain data.

    It equals no plain value, and takes part in no arithmetic, whatever the program defines:
    what an assertion rests on must have come over as plain data.
    """

    def __init__(self, client: Client, handle: int) -> None:
        """Stand for object `handle`."""
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it."""
        return _do(self, "call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Get an attribute."""
        return _do(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        _do(self, "setattr", name, value)

    def __eq__(self, other: object) -> bool:
        """Compare with another object of the program, as the program says."""
        return isinstance(other, Remote) and bool(_do(self, "eq", other))

    def __hash__(self) -> int:
        """Hash by identity."""
        return object.__hash__(self)

    def __bool__(self) -> bool:
        """Tell its truth value."""
        return bool(_do(self, "bool"))

    def __len__(self) -> int:
        """Tell its length."""
        return int(_do(self, "len"))

    def __iter__(self) -> Any:
        """Iterate over it."""
        return _do(self, "iter")

    def __next__(self) -> Any:
        """Advance it."""
        return _do(self, "next")

    def __str__(self) -> str:
        """Tell what it prints as."""
        return str(_do(self, "str"))

    def __repr__(self) -> str:
        """Tell its representation."""
        return str(_do(self, "repr"))

    def __instancecheck__(self, instance: Any) -> bool:
        """Tell whether it is the class of another object of the program."""
        return isinstance(instance, Remote) and bool(_do(instance, "isinstance", self))


def _do(remote: Remote, operation: str, *arguments: Any, **keywords: Any) -> Any:
    client: Client = object.__getattribute__(remote, "_client")
    return client.do(operation, remote, *arguments, **keywords)


def _forward(operator: str) -> Callable[..., Any]:
    return lambda self, *arguments: _do(self, operator, *arguments)


for _operator in _OPERATORS:
    setattr(Remote, f"__{_operator}__", _forward(_operator))


def run_tests(source: str, channel: Channel, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run tests against the program at the other end.

    Args:
        source: In the first line the names that the program provides, separated by blanks
            (``*``: all that the tests use and do not define); then the tests.
        channel: The way to the program.
        namespace: Where to run the tests.

    Returns:
        ``{"passed": bool, "reason": str, "message": str}``.
    """
    client = Client(channel)
    names, _, tests = source.partition("\n")
    try:
        linecache.cache["tests.py"] = (
            len(tests),
            None,
            tests.splitlines(keepends=True),
            "tests.py",
        )
        tree = ast.parse(tests, "tests.py")
        wanted = free_names(tree) if names == "*" else names.split()
        # Programs often import what their tests then use. The program's "module" could be
        # anything, so the tests get the real one.
        namespace.update((name, importlib.import_module(name)) for name in _TEST_MODULES)
        for name in wanted:
            is_there, value = client.get(name)
            if is_there:
                namespace[name] = value
        exec(compile(tree, "tests.py", "exec"), namespace)  # noqa: S102 - the tests
    except ProgramGoneError as error:
        return _verdict("exited", f"the program ended before the tests did ({error})")
    except BaseException as error:  # noqa: BLE001 - the tests; reported as the verdict
        if client.is_broken:
            return _verdict("exited", "the program ended before the tests did")
        return _verdict("failed", _explain(error))
    if client.is_broken:
        return _verdict("exited", "the program ended before the tests did")
    return _verdict("passed", "")


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


def _as_exception(error: Any) -> Exception:
    """Return the program's exception as one of Python's own, if it claims to be one."""
    name, message = (str(part) for part in error)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # UnicodeError and its kind want more than a message
            pass
    return RemoteError(f"{name}: {message}")


def _explain(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    at = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"
    ]
    where = f"line {at[-1].lineno}, {at[-1].line}: " if at else ""
    return (where + lines[-1].strip())[:2000]
