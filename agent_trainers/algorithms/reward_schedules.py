"""Schedules of reward terms: constant, linear, cosine, or adaptive to a logged metric."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from agent_envs.core.command_line import json_object, refusal


class Schedule(BaseModel):
    """A factor: `start`, or from `start` to `end` in a straight line or along half a cosine.

    ``adaptive``: `start` until the logged `metric` has reached `target` once, then `end`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["constant", "linear", "cosine", "adaptive"]
    start: float = 1.0
    end: float = 0.0
    metric: str = "success"
    target: float = 1.0


_SCHEDULES = TypeAdapter(dict[str, Schedule])


def parse_schedules(value: str | Mapping[str, Any] | None) -> dict[str, Schedule]:
    """Return the schedule of each reward term from JSON text or ``{term: {"kind": ..., ...}}``.

    Raises:
        ConfigurationError: If it is malformed; names the term and the field.
    """
    if isinstance(value, str):
        value = json_object(value, "reward_schedules")
    try:
        return _SCHEDULES.validate_python(value or {})
    except ValidationError as error:
        raise refusal("reward_schedules", error) from None


def reward_factors(
    schedules: Mapping[str, Schedule], progress: float, log: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the factor of each scheduled reward term at a completed share of the run, 0 to 1.

    `log` is the trainer's so far. Checkpoints hold it, so a resumed run knows which targets were
    met.
    """
    return {name: _factor(schedule, progress, log) for name, schedule in schedules.items()}


def _factor(schedule: Schedule, progress: float, log: Sequence[Mapping[str, Any]]) -> float:
    start, end = schedule.start, schedule.end
    if schedule.kind == "linear":
        return start + (end - start) * progress
    if schedule.kind == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
    values = [entry.get(schedule.metric) for entry in log]  # None where it is NaN
    is_met = any(value is not None and value >= schedule.target for value in values)
    return end if schedule.kind == "adaptive" and is_met else start
