"""Plain values as JSON and back: what crosses between an untrusted program and its tests.

Runs on both sides, in the sandbox: standard library only. Decoding makes nothing but plain data
(and, through `reference`, stand-ins), so a hostile sender can choose the value and no more.
"""

import json
from collections.abc import Callable
from typing import Any

_BY_TAG: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        set,
        frozenset,
        dict,
    )
}


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON-able data.

    Args:
        value: Anything. Containers are copied; subclasses become the type they extend.
        reference: Makes the JSON-able stand-in of an object that is not plain data.
    """
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, reference) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, reference) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(k, reference), encode(v, reference)] for k, v in value.items()]
        return {"dict": pairs}
    return _encode_object(value, reference)


def _encode_object(value: Any, reference: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return {"reference": reference(value)}


def decode(data: Any, reference: Callable[[Any], Any]) -> Any:
    """Return the value that `encode` wrote.

    Args:
        data: JSON-able data, possibly hostile.
        reference: Makes the object for a stand-in.

    Raises:
        ValueError: If `data` is not what `encode` writes.
    """
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, list):
        return [decode(item, reference) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("malformed value")
    [(tag, content)] = data.items()
    try:
        return _decode_tagged(tag, content, reference)
    except (TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError("malformed value") from error


def _decode_tagged(tag: str, content: Any, reference: Callable[[Any], Any]) -> Any:
    match tag:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(float.fromhex(content[0]), float.fromhex(content[1]))
        case "bytes":
            return bytes.fromhex(content)
        case "bytearray":
            return bytearray.fromhex(content)
        case "dict":
            return {decode(k, reference): decode(v, reference) for k, v in content}
        case "tuple" | "set" | "frozenset":
            return _BY_TAG[tag](decode(item, reference) for item in content)
        case "type" if content in _TYPES:
            return _TYPES[content]
        case "reference":
            return reference(content)
    raise ValueError("malformed value")


class Channel:
    """Messages over a socket: four bytes of length, then JSON."""

    def __init__(self, descriptor: int, *, max_bytes: int = 64 << 20, owns: bool = True) -> None:
        """Speak over a socket, which is closed at the end if it `owns` it."""
        self._file = open(descriptor, "r+b", buffering=0, closefd=owns)  # noqa: SIM115
        self._max_bytes = max_bytes

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
            ValueError: If what came is not a message.
        """
        length = int.from_bytes(self._read(4), "big")
        if length > self._max_bytes:
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
