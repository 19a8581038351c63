"""The messages between clients and servers: OpenEnv's, with additional fields.

JSON objects over a WebSocket (``openenv.core.env_server`` 0.3), each with a ``type`` and ``data``,
answered one by one; one connection is one session. An observation holds, besides its ``text``,
``terminated``, ``truncated``, ``info``, ``metrics``, ``task_index``, and ``generator``, the state
of the environment's random generator. The messages ``describe`` and ``reference_actions`` are ours.
"""

import json
from typing import Any, Final

import gymnasium as gym
import pydantic

from agent_envs import errors
from agent_envs.core.command_line import refusal

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Longer messages of a client end its session."""
MAX_REPLY_BYTES: Final = 100 * 2**20
"""Longer messages of a server are refused."""
TOKEN_VARIABLE: Final = "AGENT_ENVS_TOKEN"  # noqa: S105 - a name

KNOWN_ERRORS: Final[dict[str, type[Exception]]] = {
    "ResetNeeded": gym.error.ResetNeeded,
    "NotImplementedError": NotImplementedError,
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type)},
}
"""Errors that clients raise with the same type and text. The text of others stays on the server."""


class Refusal(Exception):
    """A message that was refused."""

    def __init__(self, code: str, text: str, kind: str | None = None) -> None:
        """Give the reason as `text`; `kind` is the type of the underlying error."""
        super().__init__(text)
        self.code, self.kind = code, kind


class _Data(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class Reset(_Data):
    """Begin an episode."""

    seed: int | None = None
    generator: dict[str, Any] | None = None
    """State of the random generator, as in an observation; for a reset without a seed."""
    episode_id: str | None = pydantic.Field(default=None, max_length=255)
    """Name of the episode in the state."""
    options: dict[str, Any] | None = None
    """Options of Gymnasium's ``reset``."""
    turn_limit: int | None = pydantic.Field(default=None, ge=1)
    """Turns after which the episode is truncated, if the server's limit is not lower."""


class Step(_Data):
    """Take a turn."""

    text: str
    """The whole text the model wrote."""
    metadata: dict[str, Any] = {}
    """OpenEnv's; ignored."""


class Description(pydantic.BaseModel):
    """The environment of a server, for its clients."""

    environment: str
    """Its id."""
    tool_format: str
    is_dialogue: bool
    """Whether plain text goes to a user."""
    tools: list[dict[str, Any]]
    """Function schemas."""
    num_tasks: int | None
    reward_weights: dict[str, float]
    outcome_terms: list[str]
    fingerprint: str
    """Equal for servers of the same environment with the same arguments and data."""


MESSAGES: Final[dict[str, type[_Data]]] = {
    "reset": Reset, "step": Step, "state": _Data, "close": _Data,
    "describe": _Data, "reference_actions": _Data,
}  # fmt: skip


def read_message(text: str) -> tuple[str, Any]:
    """Return the type of a client's message, and its data as one of the classes above."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal("INVALID_JSON", f"Invalid JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(kind := message.get("type"), str):
        form = '{"type": "step", "data": {...}}'
        raise Refusal("VALIDATION_ERROR", f"A message is a JSON object: {form}.")
    if kind not in MESSAGES:
        known = ", ".join(MESSAGES)
        raise Refusal("UNKNOWN_TYPE", f"Unknown message type: {kind[:80]!r}. Known: {known}.")
    try:
        return kind, MESSAGES[kind].model_validate(message.get("data", {}))
    except pydantic.ValidationError as error:
        raise Refusal("VALIDATION_ERROR", str(refusal(f"data of a {kind}", error))) from None


def write_message(kind: str, data: dict[str, Any]) -> str:
    """Return a message, as ASCII so that any text is transmitted unchanged."""
    return json.dumps({"type": kind, "data": data}, default=lambda array: array.tolist())
