"""Plain values as JSON and back: all that passes between an untrusted program and its tests.

Runs on both sides, inside sandboxes: standard library only. Decoding creates plain data only, so a
hostile sender chooses the value and nothing else.
"""

import collections
import json
import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Final, TypeAlias

_MAX_MESSAGE_BYTES: Final = 64 << 20
_COLLECTIONS: Final[tuple[tuple[str, type, Callable[[list[Any]], Any]], ...]] = (
    ("dict", dict, dict),
    ("tuple", tuple, tuple),
    ("set", set, set),
    ("frozenset", frozenset, frozenset),
    ("deque", collections.deque, collections.deque),
    ("iterator", Iterator, iter),
    ("keys", KeysView, lambda items: dict.fromkeys(items).keys()),
    ("values", ValuesView, lambda items: dict(enumerate(items)).values()),
    ("items", ItemsView, lambda items: dict(items).items()),
)
"""Tag, type, and how to build a value from its items."""
_SCALARS: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (int, lambda value: hex(int(value))),
    (float, lambda value: float(value).hex()),
    (complex, lambda value: [value.real.hex(), value.imag.hex()]),
    (bytes, lambda value: bytes(value).hex()),
    (bytearray, lambda value: bytes(value).hex()),
    (range, lambda value: [hex(value.start), hex(value.stop), hex(value.step)]),
)
_RATIONALS: Final[dict[str, Callable[[Any], Any]]] = {  # of modules that few programs import
    "decimal.Decimal": lambda value: {"Decimal": str(value)},
    "fractions.Fraction": lambda value: {
        "Fraction": [hex(value.numerator), hex(value.denominator)]
    },
}
_TYPES: Final[dict[str, type]] = {
    kind.__name__: kind
    for kind in (bool, str, list, dict, tuple, set, frozenset, *(kind for kind, _ in _SCALARS))
}


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON-able data.

    Args:
        value: Anything. Subclasses become the plain type they extend.
        other: Encodes what is no plain data.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    for kind, write in _SCALARS:
        if isinstance(value, kind):
            return {kind.__name__: write(value)}
    for tag, kind, _ in _COLLECTIONS:
        if isinstance(value, kind):
            items: Any = value.items() if isinstance(value, dict) else value
            return {tag: [encode(item, other) for item in items]}
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    name = f"{type(value).__module__}.{type(value).__name__}"
    return _RATIONALS[name](value) if name in _RATIONALS else other(value)


def _decimal(text: str) -> Any:
    import decimal

    return decimal.Decimal(text + "")


def _fraction(parts: list[str]) -> Any:
    import fractions

    return fractions.Fraction(*_integers(parts))


def _complex(parts: list[str]) -> complex:
    return complex(*map(float.fromhex, parts))


def _integers(parts: list[str]) -> list[int]:
    return [int(part, 16) for part in parts]


Tags: TypeAlias = Mapping[str, Callable[[Any], Any]]
PLAIN_TAGS: Final[Tags] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": _complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*_integers(parts)),
    "Decimal": _decimal,
    "Fraction": _fraction,
    "type": _TYPES.__getitem__,
}
"""How to decode each scalar."""
_BUILDERS: Final = {tag: build for tag, _, build in _COLLECTIONS}


def decode(data: Any, tags: Tags) -> Any:
    """Return the value that `encode` wrote.

    Args:
        data: JSON-able data, possibly hostile.
        tags: `PLAIN_TAGS`, and more.

    Raises:
        ValueError: If `data` is not what `encode` writes.
    """
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, list):
        return [decode(item, tags) for item in data]
    try:
        [(tag, content)] = data.items()
        if tag in _BUILDERS:
            return _BUILDERS[tag](decode(content, tags))
        return tags[tag](content)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError("malformed value") from error


class NotANumberError(ValueError):
    """A value is, or contains, NaN."""


class Infinity(float):
    """Infinity returned by a program: comparable, but not part of any arithmetic.

    ``inf / inf`` is NaN, and ``not abs(nan) > 1e-6`` is true: a test written that way would pass.
    """


def _refuse(*_: Any) -> Any:
    raise ArithmeticError("the program returned infinity, which cannot be calculated with")


for _name in (
    "abs add divmod float floordiv int mod mul neg pos pow radd rdivmod rfloordiv rmod rmul round "
    "rpow rsub rtruediv sub truediv trunc"
).split():
    setattr(Infinity, f"__{_name}__", _refuse)


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


def _float(text: str) -> float:
    number = float.fromhex(text)
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


HOSTILE_TAGS: Final[Tags] = {
    **PLAIN_TAGS,
    "float": _float,
    "complex": _finite(_complex),
    "Decimal": _finite(_decimal),
    "opaque": Opaque,
}
"""How to decode what a program under test returned."""


class Channel:
    """Messages over a socket: four bytes of length, then JSON."""

    def __init__(self, descriptor: int, *, owns: bool = True) -> None:
        """Use a socket, which is closed at the end if the channel `owns` it."""
        self._file = open(descriptor, "r+b", buffering=0, closefd=owns)  # noqa: SIM115

    def send(self, message: Any) -> None:
        """Send one message."""
        data = json.dumps(message).encode()
        view = memoryview(len(data).to_bytes(4, "big") + data)
        while view:
            view = view[self._file.write(view) or 0 :]

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: If the other side is gone.
            ValueError: If the data is not a message.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > _MAX_MESSAGE_BYTES:
            raise ValueError("message too long")
        return json.loads(self._read(length))

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._file.read(length - len(data))
            if not part:
                raise EOFError("the other side is gone")
            data += part
        return bytes(data)
