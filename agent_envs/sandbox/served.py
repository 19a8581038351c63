"""The program's side of its judging: does what the tests, in a sandbox of their own, ask for.

Nothing here guards anything: the program may change all of it. Runs inside: standard library only.
"""

import builtins
from collections.abc import Callable
from typing import Any, Final

from agent_envs.sandbox.values import Channel, decode, encode


def _items(value: Any) -> list[Any] | None:
    """Return the items of an object that has a number of them."""
    if not hasattr(type(value), "__len__"):
        return None
    try:
        return list(value)
    except (TypeError, LookupError):  # it has a length, but no items
        return None


_WHOLE_OBJECT: Final[dict[str, Callable[..., Any]]] = {
    "bool": bool, "len": len, "iter": iter, "next": next, "str": str, "repr": repr,
    "getattr": getattr, "setattr": setattr, "isinstance": isinstance, "items": _items,
    "eq": lambda a, b: a == b, "hash": hash, "call": lambda f, *a, **k: f(*a, **k),
}  # fmt: skip


class Server:
    """Offers the globals of a program."""

    def __init__(self, channel: Channel, namespace: dict[str, Any]) -> None:
        """Offer `namespace` over `channel`."""
        self._channel, self._namespace = channel, namespace
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self._made: dict[int, Any] = {}

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
            answer = {"value": encode(result, self._refer)}
            if result is None and name == "call":  # it may have changed its arguments
                answer["arguments"] = encode((arguments[1:], keywords), self._refer)
            return answer
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
        if "object" in reference:
            return self._make(reference)

        def call_back(*arguments: Any, **keywords: Any) -> Any:
            data = encode((arguments, keywords), self._refer)
            self._channel.send({"callback": reference["function"], "arguments": data})
            answer = self._channel.receive()
            if "error" in answer:
                kind = getattr(builtins, answer["error"], None)
                if isinstance(kind, type) and issubclass(kind, Exception):
                    raise kind
                raise RuntimeError(answer["error"])
            return decode(answer["value"], self._resolve)

        return call_back

    def _make(self, reference: Any) -> Any:
        """Make an object of the tests' as one of the program's class of that name."""
        number, name = reference["object"], reference.get("class")
        if name is not None:
            if name not in self._namespace:
                raise NameError(f"name '{name}' is not defined")
            arguments, keywords = decode(reference["arguments"], self._resolve)
            if number not in self._made:
                self._made[number] = self._namespace[name](*arguments, **keywords)
            for attribute, value in decode(reference["changed"], self._resolve).items():
                setattr(self._made[number], attribute, value)
        return self._made[number]
