"""Plain values as JSON and back: all that passes between an untrusted program and its tests.

Runs on both sides, inside sandboxes: standard library only. Decoding creates plain data only, so a
hostile sender chooses the value and nothing else.
"""

import collections
import json
import math
import socket
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Final, TextIO, TypeAlias

_MAX_MESSAGE_CHARS: Final = 64 << 20
Tags: TypeAlias = Mapping[str, Callable[[Any], Any]]


def _decimal(text: str) -> Any:
    import decimal

    return decimal.Decimal(text + "")


def _fraction(parts: list[int]) -> Any:
    import fractions

    return fractions.Fraction(*parts)


_KINDS: Final[Mapping[str, tuple[type, Callable[[Any], Any] | None, Callable[[Any], Any]]]] = {
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda parts: range(*parts)),
    "dict": (dict, None, dict),
    "tuple": (tuple, None, tuple),
    "set": (set, None, set),
    "frozenset": (frozenset, None, frozenset),
    "deque": (collections.deque, None, collections.deque),
    "iterator": (Iterator, None, iter),
    "keys": (KeysView, None, lambda items: dict.fromkeys(items).keys()),
    "values": (ValuesView, None, lambda items: dict(enumerate(items)).values()),
    "items": (ItemsView, None, lambda items: dict(items).items()),
}
"""Tag -> type, how to write a value (None: its items, encoded), and how to read it."""
_TYPES: Final = {
    kind.__name__: kind
    for kind in (bool, int, float, str, list, *(row[0] for row in _KINDS.values()))
}


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON-able data; `other` encodes what is no plain data.

    Subclasses become the plain type they extend.
    """
    if value is None or value is True or value is False:
        return value
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    for tag, (kind, write, _) in _KINDS.items():
        if isinstance(value, kind):
            items: Any = value.items() if isinstance(value, dict) else value
            return {tag: write(value) if write else [encode(item, other) for item in items]}
    own, name = type(value), type(value).__name__
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    if name == "Decimal" and own.__module__ == "decimal":  # of modules that few programs import
        return {name: str(value)}
    if name == "Fraction" and own.__module__ == "fractions":
        return {name: [value.numerator, value.denominator]}
    return other(value)


def decode(data: Any, tags: Tags) -> Any:
    """Return the value that `encode` wrote, by `PLAIN_TAGS` or more; the data may be hostile.

    Raises:
        ValueError: If it is not what `encode` writes.
    """
    if data is None or isinstance(data, bool | str | int):
        return data
    if isinstance(data, float):
        return tags["float"](data)
    if isinstance(data, list):
        return [decode(item, tags) for item in data]
    try:
        [(tag, content)] = data.items()
        is_collection = tag in _KINDS and _KINDS[tag][1] is None
        return tags[tag](decode(content, tags) if is_collection else content)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError("malformed value") from error


class NotANumberError(ValueError):
    """A value is, or contains, NaN."""


class Infinity(float):
    """Infinity returned by a program: comparable, but not part of any arithmetic.

    ``inf / inf`` is NaN, and ``not abs(nan) > 1e-6`` is true: a test written that way would pass.
    """

    def _refuse(self, *_: Any) -> Any:
        raise ArithmeticError("the program returned infinity, which cannot be calculated with")

    for _name in (
        "abs add divmod float floordiv int mod mul neg pos pow radd rdivmod rfloordiv rmod rmul "
        "round rpow rsub rtruediv sub truediv trunc"
    ).split():
        vars()[f"__{_name}__"] = _refuse


class Opaque:
    """An object of the program that is no plain data: it is true or false, and equals nothing."""

    def __init__(self, content: Any) -> None:
        """Decode ``[name of the type, truth]``."""
        name, self._truth = content
        self._name = str(name)[:100]

    def __bool__(self) -> bool:
        """Return its truth, which the program decided when it returned the object."""
        return self._truth is True

    def __repr__(self) -> str:
        """Show the type."""
        return f"<{self._name} of the program>"


def _float(number: float) -> float:
    if math.isnan(number):
        raise NotANumberError
    return Infinity(number) if math.isinf(number) else number


def _finite(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check(content: Any) -> Any:
        value = read(content)
        if not math.isfinite(abs(value)):
            raise NotANumberError
        return value

    return check


PLAIN_TAGS: Final[Tags] = {
    **{tag: read for tag, (_, _, read) in _KINDS.items()},
    "float": float,
    "Decimal": _decimal,
    "Fraction": _fraction,
    "type": _TYPES.__getitem__,
}
"""How to read what has a tag, and floats."""
HOSTILE_TAGS: Final[Tags] = {
    **PLAIN_TAGS,
    "float": _float,
    "complex": _finite(PLAIN_TAGS["complex"]),
    "Decimal": _finite(_decimal),
    "opaque": Opaque,
}
"""The same for what a program under test returned."""


def connect(descriptor: int) -> TextIO:
    """Open a socket for `send` and `receive`."""
    return socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")


def send(channel: TextIO, message: Any) -> None:
    """Send one message: a line of JSON."""
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def receive(channel: TextIO) -> Any:
    """Wait for one message; raise EOFError or ValueError if there is none."""
    line = channel.readline(_MAX_MESSAGE_CHARS)
    if not line.endswith("\n"):
        raise EOFError("the other side is gone, or says too much")
    return json.loads(line)
