"""What tests hold of a program that is elsewhere: a client, and stand-ins for its objects.

Whatever a stand-in is asked, the answer is plain data from the program's sandbox, and is judged as
such. Runs inside, in the tests' sandbox: standard library only.
"""

import builtins
import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any, Final

from agent_envs.sandbox.values import Channel, decode, encode, keep_nonfinite

# What only looks: asked once, so that an object cannot say one thing to one assertion and
# something else to the next. Whatever is done to an object of the program begins anew.
_LOOKS: Final = frozenset("bool eq float getattr getitem int isinstance items len repr str".split())
_ENDS_ITERATION: Final = (StopIteration, StopAsyncIteration)
_EXHAUSTED: Final = ("next", "StopIteration")


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
        self._looks: dict[str, Any] = {}
        self.claims: dict[int, str] = {}
        """By handle: what an object that names no items has shown itself to be."""
        self.written: set[int] = set()
        """Handles of objects whose items the tests have set: by keys, so not by position."""
        self.made: dict[int, Made] = {}
        """By id: objects of the tests' own classes, which the program gets as its own."""
        self.is_broken = False
        """Whether the program went away; it stays so, whatever the tests catch."""

    def get(self, name: str) -> tuple[bool, Any]:
        """Return whether the program has a global `name`, and its value."""
        answer = self._ask({"get": name})
        return "value" in answer, self._value(answer["value"]) if "value" in answer else None

    def do(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Have the program apply `operation`.

        Raises:
            Exception: What the program raised, if it is one of Python's own.
            RemoteError: What else the program raised.
        """
        data = encode((arguments, keywords), self._refer)
        look = json.dumps([operation, data]) if operation in _LOOKS else None
        if look is None:
            self._looks.clear()
        elif look in self._looks:
            return self._looks[look]
        answer = self._ask({"do": operation, "arguments": data})
        if "error" in answer:
            raise _as_exception(answer["error"], operation)
        value = self._value(answer.get("value", {}))
        if value is None and operation == "call" and "arguments" in answer:
            self._write_back((arguments[1:], keywords), self._value(answer["arguments"]))
        if look is not None:
            self._looks[look] = value
        return value

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

    def _value(self, data: Any) -> Any:
        try:
            return decode(data, self._resolve, keep_nonfinite)
        except (KeyError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise self._gone(error) from None

    def _gone(self, error: BaseException) -> ProgramGoneError:
        self.is_broken = True
        return ProgramGoneError(str(error))

    def _write_back(self, given: Any, left: Any) -> None:
        """Change arguments in place as the program did; only where their form is still the same."""
        try:
            for old, new in zip(given[0], left[0], strict=True):
                _updated(old, new)
            for name, old in given[1].items():
                _updated(old, left[1][name])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._gone(error) from None

    def _call_back(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._functions[int(message["callback"])]
            arguments, keywords = self._value(message["arguments"])
            return {"value": encode(function(*arguments, **keywords), self._refer)}
        except Exception as error:  # noqa: BLE001 - the tests' function on the program's values
            return {"error": type(error).__name__}  # what it says could be what is expected

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"handle": _handle(value)}
        if id(value) in self.made:
            return self.made[id(value)].as_data(self._refer)
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} cannot be passed to the program under test")
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _resolve(self, handle: Any) -> Any:
        if type(handle) is not int:
            raise ValueError("malformed value")
        return self._remotes.setdefault(handle, Remote(self, handle))


class Made:
    """An object of one of the tests' own classes, and how it was made."""

    def __init__(self, value: Any, arguments: Any, keywords: Any) -> None:
        """Remember what `value` was made of."""
        self._value, self._arguments, self._keywords = value, arguments, keywords
        self._is_sending = False
        self.first = {name: copy.copy(item) for name, item in self._attributes().items()}

    def as_data(self, reference: Callable[[Any], Any]) -> dict[str, Any]:
        """Tell the program how to make it, and what has changed in it since."""
        if self._is_sending:  # it holds itself
            return {"object": id(self._value)}
        self._is_sending = True
        try:
            changed = {
                name: item
                for name, item in self._attributes().items()
                if name not in self.first or self.first[name] != item
            }
            return {
                "object": id(self._value),
                "class": type(self._value).__name__,
                "arguments": encode((self._arguments, self._keywords), reference),
                "changed": encode(changed, reference),
            }
        finally:
            self._is_sending = False

    def _attributes(self) -> dict[str, Any]:
        return dict(getattr(self._value, "__dict__", {}))


class Remote:
    """Stands, on the tests' side, for an object of the program that is not plain data.

    It equals no plain value, and takes part in no arithmetic, whatever the program defines:
    what an assertion rests on must have come over as plain data. `abs(f(x) - 0.5) < 1e-6` would be
    for the program to decide. `in` is not defined either: Python then iterates, and compares here.
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
        return bool(_do(self, "eq", other)) if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        """Hash by identity."""
        return object.__hash__(self)

    def __bool__(self) -> bool:
        """Tell its truth value."""
        items = _items(self)
        return bool(_do(self, "bool") if items is None else items)

    def __len__(self) -> int:
        """Tell its length."""
        items = _items(self)
        if items is None:
            length = int(_do(self, "len"))
            _claim(self, "a length")
            return length
        return len(items)

    def __iter__(self) -> Any:
        """Iterate over it."""
        items = _items(self)
        if items is None:
            _claim(self, "an iterator")
            return _do(self, "iter")
        return iter(items)

    def __getitem__(self, key: Any) -> Any:
        """Get an item."""
        items = _items(self)
        if (
            items is None
            or not isinstance(key, int | slice)
            or _handle(self) in _client(self).written
        ):
            return _do(self, "getitem", key)
        return items[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an item."""
        _client(self).written.add(_handle(self))
        _do(self, "setitem", key, value)

    def __next__(self) -> Any:
        """Advance it."""
        return _do(self, "next")

    def __delitem__(self, key: Any) -> None:
        """Delete an item."""
        _do(self, "delitem", key)

    def __int__(self) -> int:
        """Tell its number."""
        return int(_do(self, "int"))

    def __float__(self) -> float:
        """Tell its number; what is not one is refused."""
        return float(_do(self, "float"))

    def __str__(self) -> str:
        """Tell what it prints as."""
        return str(_do(self, "str"))

    def __repr__(self) -> str:
        """Tell its representation."""
        return str(_do(self, "repr"))

    def __instancecheck__(self, instance: Any) -> bool:
        """Tell whether it is the class of another object of the program."""
        return isinstance(instance, Remote) and bool(_do(instance, "isinstance", self))


def _client(remote: Remote) -> Client:
    client: Client = object.__getattribute__(remote, "_client")
    return client


def _handle(remote: Remote) -> int:
    handle: int = object.__getattribute__(remote, "_handle")
    return handle


def _do(remote: Remote, operation: str, *arguments: Any, **keywords: Any) -> Any:
    return _client(remote).do(operation, remote, *arguments, **keywords)


def _items(remote: Remote) -> list[Any] | None:
    """Return the items of an object that has a number of them; length and items then agree."""
    items = _do(remote, "items")
    return items if isinstance(items, list) else None


def _claim(remote: Remote, what: str) -> None:
    """Refuse an object that is now this and now that.

    Raises:
        RemoteError: If it has a length and is iterated, but never named its items.
    """
    if _client(remote).claims.setdefault(_handle(remote), what) != what:
        raise RemoteError("an object of the program has a length that is not that of its items")


def _updated(old: Any, new: Any) -> Any:
    """Make one value of the tests what it became; return it, or what stands in its place."""
    if type(old) is not type(new):
        return old if isinstance(new, Remote) else new
    if isinstance(old, list):
        old[:] = [_updated(o, n) for o, n in zip(old, new, strict=False)] + new[len(old) :]
    elif isinstance(old, dict):
        changed = {key: _updated(old[key], new[key]) if key in old else new[key] for key in new}
        old.clear()
        old.update(changed)
    elif isinstance(old, set | bytearray):
        old.clear()
        old.update(new) if isinstance(old, set) else old.extend(new)
    else:
        return new
    return old


def _as_exception(error: Any, operation: str) -> Exception:
    """Return the program's exception as one of Python's own, if it claims to be one.

    Not one that says something to the interpreter: `StopIteration` out of a call would end the
    loop of the tests that the call is in.
    """
    name, message = (str(part) for part in error)
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RemoteError(f"{name}: {message}")
    if not issubclass(kind, _ENDS_ITERATION) or (operation, name) == _EXHAUSTED:
        with contextlib.suppress(TypeError):  # UnicodeError and its kind want more than a message
            return kind(message)
    return RemoteError(f"{name}: {message}")
