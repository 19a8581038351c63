"""Chat messages: what a state is made of, ready for a chat template."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NotRequired, SupportsIndex, TypedDict, TypeVar

T = TypeVar("T")
Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    name: NotRequired[str]
    """The tool that spoke, where `role` is ``"tool"``."""


class SharedList(list[T]):
    """A list whose items are copied when it is first read; what copies and pickles is a plain list.

    Every step hands out the whole state, and few are read by whoever changes things. So a step
    costs the same however long the conversation is, and a change stays in the list it is made in.
    """

    _is_shared = True

    def _copies(self, items: Iterable[T]) -> list[T]:
        raise NotImplementedError

    def _own(self) -> None:
        if self._is_shared:
            self._is_shared = False
            self[:] = self._copies(super().__iter__())

    def __getitem__(self, place: Any) -> Any:
        """Return an item, or a list of some."""
        self._own()
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[T]:
        """Go through the items."""
        self._own()
        return super().__iter__()

    def __reversed__(self) -> Iterator[T]:
        """Go through the items from the last to the first."""
        self._own()
        return super().__reversed__()

    def __add__(self, other: list[Any]) -> list[Any]:
        """Return a list of these items and others."""
        return [*self, *other]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as a plain list."""
        return list, (list(self),)

    def pop(self, place: SupportsIndex = -1) -> T:
        """Remove an item and return it."""
        self._own()
        return super().pop(place)

    def copy(self) -> list[T]:
        """Return a list of the same items."""
        return list(self)


class StateMessages(SharedList[Message]):
    """The messages of a state."""

    def _copies(self, items: Iterable[Message]) -> list[Message]:
        return [message.copy() for message in items]


class ToolSchemas(SharedList[dict[str, Any]]):
    """The function schemas of the tools, in the OpenAI format."""

    def _copies(self, items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        schemas: list[dict[str, Any]] = json.loads(json.dumps(list(items)))
        return schemas
