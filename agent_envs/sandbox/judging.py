"""Judge a program: tests on one side, the program on the other, plain values in between.

The tests run in a separate sandbox. Calling a function of the program sends its arguments to
the program's sandbox (`serve`) and decodes the result as plain data. So every comparison happens
where no line of the program runs, and there is nothing to forge: no token to read, no assert to
patch, no exit code to set. Decoding creates plain data only, so a hostile sender chooses the value
and nothing else. Runs inside sandboxes: standard library only.
"""

import ast
import builtins
import contextlib
import importlib
import json
import linecache
import math
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TextIO, cast

_TEST_MODULES: Final = ("collections", "itertools", "math", "random", "re", "string", "sys")
_GONE_TEXT: Final = "the program ended before the tests did"
_MAX_MESSAGE_CHARS: Final = 2000
_KINDS: Final[Mapping[str, tuple[type, Callable[[Any], Any] | None, Callable[[Any], Any]]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda parts: range(*parts)),
    "dict": (dict, None, dict),
    "tuple": (tuple, None, tuple),
    "set": (set, None, set),
    "frozenset": (frozenset, None, frozenset),
    "iterator": (Iterator, None, iter),
}
"""Tag -> type, how to write a value (None: its items, encoded), and how to read it."""
_ANY: Final = (Exception, BaseException, object)
_TYPES: Final = {t.__name__: t for t in (bool, int, float, str, list, bytes, dict, tuple, set)}


class NotANumberError(ValueError):
    """A value is, or contains, NaN or infinity."""


class ProgramGoneError(BaseException):
    """The program ended or sent no value; tests must not catch it as an ordinary exception."""


class RemoteError(Exception):
    """The program failed with something that is not one of Python's own exceptions."""


class Program:
    """The program under test, as its tests see it."""

    def __init__(
        self, channel: TextIO, helper_classes: frozenset[type], words: frozenset[str]
    ) -> None:
        """Connect to `serve`.

        Objects of `helper_classes` may be passed to the program. Of its exceptions, those that
        `words`, the words of the tests, contain keep their type.
        """
        self._channel, self._helper_classes, self._words = channel, helper_classes, words
        self.is_gone = False
        """Whether the program ended; it stays so, whatever the tests catch."""

    def copy_globals(self, names: list[str], namespace: dict[str, Any]) -> None:
        """Copy those of `names` that the program defines; functions become remote calls."""
        for name in names:
            answer = self._request({"name": name})
            if answer.get("callable"):
                namespace[name] = self._function(name)
            elif not answer.get("missing"):
                namespace[name] = answer["value"]

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            data = encode((arguments, keywords), self._encode_object)
            return self._request({"name": name, "arguments": data})["value"]

        function.__name__ = name
        return function

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the program's answer, with its ``value`` decoded; raise what the program raised.

        Raises:
            ProgramGoneError: If there is no valid answer.
        """
        try:
            send(self._channel, request)
            answer = dict(receive(self._channel))
            name, message = answer.get("error", (None, None))
            error = None if name is None else _as_exception(name, message, self._words)
            answer["value"] = decode(answer.get("value"))
        except NotANumberError:
            raise RemoteError(f"{request['name']}() returned NaN or infinity") from None
        except (
            EOFError, OSError, ValueError, TypeError, LookupError, RecursionError, MemoryError,
        ) as problem:  # fmt: skip
            self.is_gone = True
            raise ProgramGoneError(str(problem)) from None
        if error is not None:
            raise error
        return answer

    def _encode_object(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        if kind not in self._helper_classes:
            raise TypeError(f"a {kind.__name__} cannot be passed to the program under test")
        return {"object": [kind.__name__, encode(vars(value), self._encode_object)]}


def _as_exception(name: str, message: str, words: frozenset[str]) -> Exception:
    """Return the program's exception as one of Python's own, if the tests mention it or its base.

    Others would steer the tests: `StopIteration` ends the loop that contains the call, `IndexError`
    one over ``__getitem__``, and `AttributeError` decides `hasattr`.
    """
    kind: Any = getattr(builtins, name, None)
    is_known = isinstance(kind, type) and issubclass(kind, Exception) and "Stop" not in name
    if is_known and any(k.__name__ in words and k not in _ANY for k in kind.__mro__):
        with contextlib.suppress(TypeError):  # UnicodeError and its kind need more arguments
            return cast(Exception, kind(str(message)))
    return RemoteError(f"{name}: {message}")


def serve(channel: TextIO, namespace: dict[str, Any]) -> None:
    """Be the program's side: look up and call its globals until the tests are over.

    Nothing here guards anything: the program may change all of it.
    """

    def make(content: Any) -> Any:
        kind = namespace[content[0]]
        value = kind.__new__(kind)
        vars(value).update(decode(content[1], make))
        return value

    sys.set_int_max_str_digits(0)  # of integers in messages
    with contextlib.suppress(EOFError):
        while True:
            send(channel, _answer(receive(channel), namespace, make))


def _answer(
    request: dict[str, Any], namespace: dict[str, Any], make: Callable[[Any], Any]
) -> dict[str, Any]:
    try:
        if request["name"] not in namespace:
            return {"missing": True}
        value = namespace[request["name"]]
        if "arguments" in request:
            arguments, keywords = decode(request["arguments"], make)
            value = value(*arguments, **keywords)
        elif callable(value):
            return {"callable": True}
        return {"value": encode(value, _refuse)}
    except BaseException as error:  # noqa: BLE001 - untrusted code; the tests judge it
        return {"error": [type(error).__name__, str(error)]}


def _refuse(value: Any) -> Any:
    raise TypeError(f"the program returned an object of the class {type(value).__name__}")


def run_tests(source: str, channel: TextIO, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run tests against the program at the other end; return the fields of a `Verdict`.

    `source` is a JSON list: tests; names that the program provides (None: all that the tests use
    and do not define); helpers, trusted Python that defines what else they use.
    """
    tests, names, helpers = json.loads(source)
    sys.set_int_max_str_digits(0)  # of integers in messages
    linecache.cache["tests.py"] = (len(tests), None, tests.splitlines(keepends=True), "tests.py")
    program: Program | None = None
    reason, message = "passed", ""
    try:
        # The program's "module" could be anything, so the tests get the real ones.
        namespace.update((name, importlib.import_module(name)) for name in _TEST_MODULES)
        free = _free_names(ast.parse(tests, "tests.py"))
        names = free if names is None else names
        trusted = set(free).difference(names)
        code, defined = compile(helpers, "helpers.py", "exec"), dict[str, Any]()
        if trusted.intersection(code.co_names):
            defined["__name__"] = "helpers"
            exec(code, defined)  # noqa: S102 - trusted
        namespace.update((name, defined[name]) for name in trusted if name in defined)
        kinds = (v for v in defined.values() if isinstance(v, type) and v.__module__ == "helpers")
        words = frozenset(re.findall(r"\w+", f"{tests} {helpers}"))
        program = Program(channel, frozenset(kinds), words)
        program.copy_globals(names, namespace)
        exec(compile(tests, "tests.py", "exec"), namespace)  # noqa: S102 - trusted tests
    except ProgramGoneError as error:
        reason, message = "exited", f"{_GONE_TEXT} ({error})"
    except BaseException as error:  # noqa: BLE001 - the tests; reported as the verdict
        frames = traceback.extract_tb(error.__traceback__)
        at = [frame for frame in frames if frame.filename == "tests.py"]
        where = f"line {at[-1].lineno}, {at[-1].line}: " if at else ""
        message = where + traceback.format_exception_only(error)[-1].strip()
        reason = "failed"
    if program is not None and program.is_gone and reason != "exited":
        reason, message = "exited", _GONE_TEXT
    message = message[:_MAX_MESSAGE_CHARS]
    return {"passed": reason == "passed", "reason": reason, "message": message}


def _free_names(tree: ast.Module) -> list[str]:
    """Return the names that tests use and neither define nor have from Python."""
    nodes = list(ast.walk(tree))
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name for node in nodes if isinstance(node, kinds)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    return sorted(used - defined - set(sys.stdlib_module_names) - set(dir(builtins)))


def encode(value: Any, encode_object: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON-able data; `encode_object` encodes what is no plain data.

    Subclasses become the plain type they extend.
    """
    if value is None or value is True or value is False:
        return value
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, encode_object) for item in value]
    for tag, (kind, write, _) in _KINDS.items():
        if isinstance(value, kind):
            items: Any = value.items() if isinstance(value, dict) else value
            return {tag: write(value) if write else [encode(i, encode_object) for i in items]}
    for name, kind in _TYPES.items():
        if value is kind:
            return {"type": name}
    return encode_object(value)


def decode(data: Any, make_object: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that `encode` wrote; the data may be hostile unless there is `make_object`.

    Raises:
        NotANumberError: If hostile data contain a number that is not finite, whose comparisons
            would mislead: ``not abs(nan - 4) > 1e-6`` is true.
        ValueError: If it is not what `encode` writes.
    """
    if data is None or isinstance(data, bool | str | int):
        return data
    if isinstance(data, list):
        return [decode(item, make_object) for item in data]
    try:
        if isinstance(data, float):
            value: Any = data
        else:
            [(tag, content)] = data.items()
            if tag == "type":
                return _TYPES[content]
            if tag == "object" and make_object is not None:
                return make_object(content)
            _, write, read = _KINDS[tag]
            value = read(content if write else decode(content, make_object))
        is_number = isinstance(value, float | complex)
        if is_number and make_object is None and not math.isfinite(abs(value)):
            raise NotANumberError
        return value
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError("malformed value") from error


def connect(descriptor: int) -> TextIO:
    """Open a socket for `send` and `receive`."""
    return socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")


def send(channel: TextIO, message: Any) -> None:
    """Send one message: a line of JSON."""
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def receive(channel: TextIO) -> Any:
    """Wait for one message; raise EOFError or ValueError if there is none."""
    line = channel.readline()
    if not line.endswith("\n"):
        raise EOFError("the other side is gone")
    return json.loads(line)
