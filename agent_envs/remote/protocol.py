"""The messages between clients and servers: OpenEnv's, with additional fields.

The protocol is that of OpenEnv 0.3 (``openenv.core.env_server``): JSON objects over a WebSocket,
each with a ``type`` and ``data``, answered one by one; one connection is one session. An action is
``{"text": ...}``. An observation holds, besides its ``text``, what OpenEnv lacks: ``terminated``
and ``truncated`` (``done`` is either of them), ``info``, ``metrics``, ``task_index``, and
``generator``, the state of the environment's random generator. ``reset`` takes ``options``,
``turn_limit`` and ``generator`` besides OpenEnv's ``seed`` and ``episode_id``. The message
``reference_actions`` is ours.
"""

import json
from enum import StrEnum
from typing import Any, Final

import gymnasium as gym
import numpy as np
import pydantic

from agent_envs import errors

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Longer messages of a client end its session."""
MAX_REPLY_BYTES: Final = 100 * 2**20
"""Longer messages of a server are refused."""
TOKEN_VARIABLE: Final = "AGENT_ENVS_TOKEN"  # noqa: S105 - a name

CALLER_ERRORS: Final = (errors.ActionTypeError, errors.ConfigurationError, gym.error.Error)
"""Errors for wrong arguments, after which an environment is still usable."""
KNOWN_ERRORS: Final = {
    kind.__name__: kind
    for kind in (
        errors.ActionTypeError, errors.ConfigurationError, errors.DataError, errors.SnapshotError,
        errors.MissingExtraError, errors.UnknownNameError, errors.SandboxError,
        errors.SandboxUnavailableError, gym.error.ResetNeeded, NotImplementedError,
    )
}  # fmt: skip
"""Errors that clients raise with the same type and text. The text of others stays on the server."""


class ErrorCode(StrEnum):
    """Why a message was refused; all but the last are OpenEnv's."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    NOT_OFFERED = "NOT_OFFERED"


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
    """Name of the episode in `State`."""
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


class Observation(_Data):
    """An observation; for ``/schema``."""

    text: str
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    metrics: dict[str, float]
    task_index: int | None
    generator: dict[str, Any]
    session: str | None = None


class State(_Data):
    """The state of a session; for ``/schema``."""

    episode_id: str | None
    step_count: int
    task_id: str | None


MESSAGES: Final[dict[str, type[_Data]]] = {
    "reset": Reset, "step": Step, "state": _Data, "close": _Data, "reference_actions": _Data
}  # fmt: skip


def read_message(text: str) -> tuple[str, Any]:
    """Return the type of a client's message, and its data as one of the classes above."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(ErrorCode.INVALID_JSON, f"Invalid JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        form = '{"type": "step", "data": {...}}'
        raise Refusal(ErrorCode.VALIDATION_ERROR, f"A message is a JSON object: {form}.")
    kind = message["type"]
    if kind not in MESSAGES:
        text = f"Unknown message type: {kind[:80]!r}. Known: {', '.join(MESSAGES)}."
        raise Refusal(ErrorCode.UNKNOWN_TYPE, text)
    try:
        return kind, MESSAGES[kind].model_validate(message.get("data", {}))
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'data'}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_context=False)[:5]
        )
        text = f"Invalid data of a {kind} message: {problems}."
        raise Refusal(ErrorCode.VALIDATION_ERROR, text) from None


def write_reply(kind: str, data: dict[str, Any]) -> str:
    """Return a server's message, as ASCII so that any text is transmitted unchanged."""
    return json.dumps({"type": kind, "data": data}, default=numpy_as_json)


def write_refusal(refusal: Refusal) -> str:
    """Return the reply to a refused message."""
    data = {"message": str(refusal), "code": str(refusal.code)}
    return write_reply("error", data | ({"kind": refusal.kind} if refusal.kind else {}))


def numpy_as_json(value: Any) -> Any:
    """Return numbers and arrays of numpy as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")
