"""What a program asks of the model with one call, whichever of the API's endpoints it uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_envs.core.tool import Tool
from agent_trainers.gateway.conversation import ApiMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call that was read and found sound."""

    messages: Sequence[ApiMessage]
    """The whole conversation."""
    tools: Mapping[str, Tool]
    """The program's functions by name."""
    shown_tools: list[dict[str, Any]] | None
    """What the chat template is given; None where the messages describe the tools."""
    reads_calls: bool = True
    """Whether calls in what the model writes are given as calls."""
    is_parallel: bool = True
    """Whether a turn may hold several calls."""
    num_choices: int = 1
    """Turns that are sampled in the same state."""
    max_tokens: int | None = None
    """Tokens of a turn, at most."""
    stops: tuple[str, ...] = ()
    """Texts that end a turn."""
    reply_kind: str = "chatcmpl"
    """What the id of the reply begins with."""
    seed: int | None = None
    """The same seed in the same state of the same session samples the same turn."""
    role: str = ""
    """Who asks, where a program has several roles."""
