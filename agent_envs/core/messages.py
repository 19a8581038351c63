"""Chat messages: the parts of a state, ready for a chat template."""

import itertools
from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    name: NotRequired[str]
    """The tool, if `role` is ``"tool"``."""


def new_text(state: Sequence[Message]) -> str:
    """Return the text of a state that follows the model's last message, without system prompts."""
    since = itertools.takewhile(lambda message: message["role"] != "assistant", reversed(state))
    texts = [message["content"] for message in since if message["role"] != "system"]
    return "\n\n".join(reversed(texts))
