"""Chat messages: the parts of a state, ready for a chat template."""

from typing import Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    name: NotRequired[str]
    """The tool, if `role` is ``"tool"``."""
