"""Plain values as JSON and back: what crosses between an untrusted program and its tests.

Runs on both sides, in the sandbox: standard library only. Decoding makes nothing but plain data
(and, through `reference`, stand-ins), so a hostile sender can choose the value and no more.
"""

import json
import math
from collections.abc import Callable
from typing import Any, Final

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
_RATIONALS: Final = (("decimal", "Decimal"), ("fractions", "Fraction"))


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
    kind = type(value)
    if kind is range:
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    if (kind.__module__, kind.__name__) in _RATIONALS:  # not imported here: few programs need them
        if kind.__name__ == "Decimal":
            return {"Decimal": str(value)}
        return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
    return {"reference": reference(value)}


def decode(
    data: Any, reference: Callable[[Any], Any], number: Callable[[float], float] = float
) -> Any:
    """Return the value that `encode` wrote.

    Args:
        data: JSON-able data, possibly hostile.
        reference: Makes the object for a stand-in.
        number: Takes each float; what it returns stands in its place.

    Raises:
        ValueError: If `data` is not what `encode` writes.
    """
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, list):
        return [decode(item, reference, number) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("malformed value")
    [(tag, content)] = data.items()
    try:
        return _decode_tagged(tag, content, reference, number)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError("malformed value") from error


def _decode_tagged(
    tag: str, content: Any, reference: Callable[[Any], Any], number: Callable[[float], float]
) -> Any:
    if tag in _SCALARS:
        return _SCALARS[tag](content)
    match tag:
        case "float":
            return number(float.fromhex(content))
        case "dict":
            return dict(decode(content, reference, number))
        case "tuple" | "set" | "frozenset":
            return _BY_TAG[tag](decode(content, reference, number))
        case "type" if content in _TYPES:
            return _TYPES[content]
        case "reference":
            return reference(content)
    raise ValueError("malformed value")


def _complex(parts: list[str]) -> complex:
    real, imaginary = (float.fromhex(part) for part in parts)
    if math.isnan(real) or math.isnan(imaginary):  # its absolute value would be a plain float
        raise ValueError("a complex number that is not a number")
    return complex(real, imaginary)


def _decimal(text: str) -> Any:
    import decimal

    value = decimal.Decimal(text + "")
    if value.is_nan():
        raise ValueError("a decimal number that is not a number")
    return value


def _fraction(parts: list[str]) -> Any:
    import fractions

    numerator, denominator = (int(part, 16) for part in parts)
    return fractions.Fraction(numerator, denominator)


_MAX_MESSAGE_BYTES: Final = 64 << 20
_SCALARS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": lambda text: int(text, 16),
    "complex": _complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
    "Decimal": _decimal,
    "Fraction": _fraction,
}


class NonFinite(float):
    """Infinity, or what is not a number, out of a program under test.

    ``not abs(nan - 4) > 1e-6`` is true, and so would be a test that is written that way. Here what
    is not a number stays that through arithmetic, and refuses to be ordered.
    """

    def __float__(self) -> float:
        """Return infinity as a plain number."""
        self._refuse_nan()
        return float.__add__(self, 0.0)

    def _refuse_nan(self, *others: Any) -> None:
        if any(math.isnan(value) for value in (self, *others) if isinstance(value, float)):
            raise ArithmeticError("what is not a number (NaN) is neither more nor less")


def keep_nonfinite(value: Any) -> Any:
    """Return a float that is not finite as `NonFinite`, anything else as it is."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return NonFinite(value) if is_odd else value


def _calculate(name: str) -> Callable[..., Any]:
    return lambda self, *others: keep_nonfinite(getattr(float, name)(self, *others))


def _order(name: str) -> Callable[..., bool]:
    def compare(self: NonFinite, other: Any) -> bool:
        self._refuse_nan(other)
        answer: bool = getattr(float, name)(self, other)
        return answer

    return compare


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(NonFinite, f"__{_name}__", _calculate(f"__{_name}__"))
    setattr(NonFinite, f"__r{_name}__", _calculate(f"__r{_name}__"))
for _name in ("abs", "neg", "pos", "round"):
    setattr(NonFinite, f"__{_name}__", _calculate(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(NonFinite, f"__{_name}__", _order(f"__{_name}__"))


class Channel:
    """Messages over a socket: four bytes of length, then JSON."""

    def __init__(self, descriptor: int, *, owns: bool = True) -> None:
        """Speak over a socket, which is closed at the end if it `owns` it."""
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
            ValueError: If what came is not a message.
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
