"""Chat messages: what a state is made of, ready for a chat template."""

from typing import Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    name: NotRequired[str]
    """The tool that spoke, where `role` is ``"tool"``."""
