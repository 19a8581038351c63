"""Plain values as JSON and back: all that passes between an untrusted program and its tests.

Runs on both sides, inside sandboxes: standard library only. Decoding creates plain data only, so a
hostile sender chooses the value and nothing else.
"""

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TextIO

_MAX_MESSAGE_CHARS: Final = 64 << 20
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
_TYPES: Final = {t.__name__: t for t in (bool, int, float, str, list, bytes, dict, tuple, set)}


class NotANumberError(ValueError):
    """A value is, or contains, NaN or infinity."""


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
    line = channel.readline(_MAX_MESSAGE_CHARS)
    if not line.endswith("\n"):
        raise EOFError("the other side is gone, or says too much")
    return json.loads(line)
