"""What goes over the wire: OpenEnv's messages, and what of an episode they have no place for.

The protocol is that of OpenEnv 0.3 (``openenv.core.env_server``): JSON objects over a WebSocket,
each with a ``type`` and ``data``, answered one by one; one connection is one session. In it an
action is ``{"text": ...}``, and an observation holds, besides its ``text``, what OpenEnv lacks:
``terminated`` and ``truncated`` (``done`` is either of them), ``info``, ``metrics``,
``task_index``, and ``snapshot`` where it was asked for. ``reset`` takes ``options``, ``turn_limit``
and ``with_snapshots`` besides OpenEnv's ``seed`` and ``episode_id``. Two types of message are ours:
``restore`` and ``reference_actions``.
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
"""Longer messages of a server are not read."""
TOKEN_VARIABLE: Final = "AGENT_ENVS_TOKEN"  # noqa: S105 - a name
KEY_VARIABLE: Final = "AGENT_ENVS_KEY"

CALLERS_MISTAKES: Final = (errors.ActionTypeError, errors.ConfigurationError, gym.error.Error)
"""What an environment raises at wrong arguments; it can be played on."""
RAISED_AGAIN: Final = {
    kind.__name__: kind
    for kind in (
        errors.ActionTypeError, errors.ConfigurationError, errors.DataError, errors.SnapshotError,
        errors.MissingExtraError, errors.UnknownNameError, errors.SandboxError,
        errors.SandboxUnavailableError, gym.error.ResetNeeded, NotImplementedError,
    )
}  # fmt: skip
"""Errors that a client raises as the same type, with the same text; these texts are for users."""


class ErrorCode(StrEnum):
    """Why a message was not carried out; all but the last two are OpenEnv's."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SNAPSHOT_REFUSED = "SNAPSHOT_REFUSED"
    NOT_OFFERED = "NOT_OFFERED"


class Refusal(Exception):
    """A message that is not carried out."""

    def __init__(self, code: str, text: str, kind: str | None = None) -> None:
        """Say why, in `text`; `kind` is the type of the error behind it."""
        super().__init__(text)
        self.code, self.kind = code, kind


class _Data(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class NoData(_Data):
    """Of messages that say all by their type."""


class Reset(_Data):
    """Begin an episode."""

    seed: int | None = None
    episode_id: str | None = pydantic.Field(default=None, max_length=255)
    """A name of the client's own, which `State` shows again."""
    options: dict[str, Any] | None = None
    """Those of Gymnasium's ``reset``."""
    turn_limit: int | None = pydantic.Field(default=None, ge=1)
    """Turns after which the episode is cut off, if the server's own limit is not lower."""
    with_snapshots: bool = False
    """Whether each observation is to hold a sealed snapshot."""


class Step(_Data):
    """Take a turn."""

    text: str
    """The whole text the model wrote."""
    metadata: dict[str, Any] = {}
    """OpenEnv's; not read."""


class Restore(_Data):
    """Go on from where a snapshot was taken."""

    snapshot: str
    turn_limit: int | None = pydantic.Field(default=None, ge=1)


class Observation(_Data):
    """What a client sees of an episode; for ``/schema``."""

    text: str
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    metrics: dict[str, float]
    task_index: int | None
    snapshot: str | None = None
    session: str | None = None


class State(_Data):
    """Where a session is; for ``/schema``."""

    episode_id: str | None
    step_count: int
    task_id: str | None


MESSAGES: Final[dict[str, type[_Data]]] = {
    "reset": Reset, "step": Step, "state": NoData, "close": NoData,
    "restore": Restore, "reference_actions": NoData,
}  # fmt: skip


def read_message(text: str) -> tuple[str, Any]:
    """Return the type of a client's message, and its data as one of the classes above.

    Raises:
        Refusal: If it is none; says what is wrong.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(ErrorCode.INVALID_JSON, f"Invalid JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        form = '{"type": "step", "data": {...}}'
        raise Refusal(ErrorCode.VALIDATION_ERROR, f"A message is a JSON object: {form}.")
    kind = message["type"]
    if kind not in MESSAGES:
        known = ", ".join(MESSAGES)
        text = f"Unknown message type: {kind[:80]!r}. Known: {known}."
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
    """Return a server's message as ASCII, so that any text goes through unchanged.

    Raises:
        TypeError: If something in it is not JSON.
    """
    return json.dumps({"type": kind, "data": data}, default=plain)


def write_refusal(refusal: Refusal) -> str:
    """Return the message that says why another was not carried out."""
    data = {"message": str(refusal), "code": str(refusal.code)}
    return write_reply("error", data | ({"kind": refusal.kind} if refusal.kind else {}))


def plain(value: Any) -> Any:
    """Return what JSON writes for numbers and arrays of numpy.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")
