"""Chat messages: what a state is made of, ready for a chat template."""

from collections.abc import Iterator
from typing import Any, Literal, NotRequired, SupportsIndex, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    name: NotRequired[str]
    """The tool that spoke, where `role` is ``"tool"``."""


class StateMessages(list[Message]):
    """The messages of a state: a list whose messages are copied when it is first read.

    Every step hands out the whole state, and few are read by whoever changes messages. So a step
    costs the same however long the conversation is, and a change stays in the list it is made in.
    """

    _is_shared = True

    def _own(self) -> None:
        if self._is_shared:
            self._is_shared = False
            self[:] = [message.copy() for message in super().__iter__()]

    def __getitem__(self, place: Any) -> Any:
        """Return a message, or a list of some."""
        self._own()
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Message]:
        """Go through the messages."""
        self._own()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Message]:
        """Go through the messages from the last to the first."""
        self._own()
        return super().__reversed__()

    def __add__(self, other: list[Any]) -> list[Any]:
        """Return a list of these messages and others."""
        return [*self, *other]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as a plain list."""
        return list, (list(self),)

    def pop(self, place: SupportsIndex = -1) -> Message:
        """Remove a message and return it."""
        self._own()
        return super().pop(place)

    def copy(self) -> list[Message]:
        """Return a list of the same messages."""
        return list(self)
