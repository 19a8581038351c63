"""Chat messages: what a state is made of, ready for a chat template."""

from collections.abc import Iterable
from typing import Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    name: NotRequired[str]
    """The tool that spoke, where `role` is ``"tool"``."""


def copy_messages(messages: Iterable[Message]) -> list[Message]:
    """Copy a list of messages, so that a caller may change what it was given."""
    return [message.copy() for message in messages]
