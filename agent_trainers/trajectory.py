"""What was played: pure data, without models or tensors, and its way to files and back.

Tokens that were sampled are kept as they were sampled, with their log-probabilities: they are the
tokens that are trained.
"""

import dataclasses
import functools
import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.messages import Message
from agent_envs.data.files import atomic_path
from agent_envs.data.records import read_records
from agent_envs.errors import DataError


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The environment said so: the agent answered, or the task is done."""
    TURN_LIMIT = "turn_limit"
    """Truncated: no turns were left."""
    TOKEN_LIMIT = "token_limit"  # noqa: S105 - not a password
    """Truncated: a turn was cut off for its length."""
    CONTEXT_OVERFLOW = "context_overflow"
    """Truncated: the state no longer fitted the policy."""
    TIMEOUT = "timeout"
    """Failed: the environment did not reply in time."""
    ENVIRONMENT_ERROR = "environment_error"
    """Failed: the environment raised, or gave a reward that is no number."""
    POLICY_ERROR = "policy_error"
    """Failed: the policy gave no action, as a server that does not answer."""
    LEFT_OUT = "left_out"
    """Failed: it was still going on when every group had its quorum."""


_FAILURES: Final = (
    StopReason.TIMEOUT,
    StopReason.ENVIRONMENT_ERROR,
    StopReason.POLICY_ERROR,
    StopReason.LEFT_OUT,
)
_TRUNCATIONS: Final = (
    StopReason.TURN_LIMIT,
    StopReason.TOKEN_LIMIT,
    StopReason.CONTEXT_OVERFLOW,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One environment step: a state, the action taken in it, and what came of it."""

    messages: list[Message]
    """The state ``s_t``."""
    prompt_ids: list[int]
    """The state's tokens."""
    completion_ids: list[int]
    """The action's tokens, as sampled."""
    logprobs: npt.NDArray[np.float32]
    """Log-probability of each sampled token, shape (len(completion_ids),)."""
    action: str
    """The action ``a_t`` as text."""
    reward: float
    """The reward ``r_t``."""
    reward_terms: dict[str, float]
    """Contribution of each reward term; they sum to `reward`."""
    terminated: bool
    """Whether the task is over."""
    truncated: bool
    """Whether the episode was cut off here, and the task is not over."""
    info: dict[str, Any]
    """What else the environment said about the step, without messages and tools."""

    @property
    def role(self) -> str:
        """Who acted, where a program has several roles; else empty."""
        return str(self.info.get("agent_role", ""))

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is learned from the step, because its role is not trained."""
        return bool(self.info.get("is_frozen", False))

    def __eq__(self, other: object) -> bool:
        """Compare every field, log-probabilities bit by bit."""
        if not isinstance(other, Transition):
            return NotImplemented
        mine, theirs = (
            json.dumps(_transition_record(t), default=_plain, sort_keys=True) for t in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode."""

    task_id: str
    """The environment's id of the task."""
    group_id: str
    """Episodes with the same id are compared with each other."""
    transitions: list[Transition]
    """The steps, in order."""
    metrics: dict[str, float]
    """What the environment measured at the end."""
    timings: dict[str, float]
    """Seconds by kind of work."""
    stop_reason: StopReason
    """Why the episode ended."""
    error: str | None = None
    """The error, where the episode could not end."""
    final_prompt_ids: list[int] = field(default_factory=list)
    """Tokens of the state after the last step, where the episode was truncated: a critic says what
    it was still worth. Where that state did not fit or was cut off, up to the last action."""
    usage: dict[str, int] = field(default_factory=dict)
    """What its actions asked of the model: calls, prompt_tokens, completion_tokens."""
    step_seconds: list[float] = field(default_factory=list, compare=False)
    """Seconds that the environment took for each step, shape (S,); empty where not measured."""
    env: str = ""
    """The name of the environment, where several are played."""
    task: int | None = None
    """The task's index in the environment, with which the episode began; None: drawn by `seed`."""
    seed: int | None = None
    """The seed with which it began: its actions, taken again, lead to the same states. None where
    it was not played in an environment."""
    start: int = 0
    """The first step that was played here: an episode that branched off another shares the steps
    before with that one. `usage` and `timings` are without them."""

    @property
    def rewards(self) -> list[float]:
        """Reward of each step, shape (S,)."""
        return [transition.reward for transition in self.transitions]

    @property
    def lengths(self) -> list[int]:
        """Number of action tokens of each step, shape (S,)."""
        return [len(transition.completion_ids) for transition in self.transitions]

    @property
    def anchors(self) -> list[str]:
        """The observation before each step, shape (S,): the last message of its state."""
        return [str(transition.messages[-1]["content"]) for transition in self.transitions]

    @property
    def return_(self) -> float:
        """Sum of the rewards, not discounted."""
        return float(sum(self.rewards))

    @property
    def success(self) -> bool:
        """Whether the environment counts the episode as a success."""
        return self.metrics.get("success", 0.0) > 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was cut off, and might have gone on."""
        return self.stop_reason in _TRUNCATIONS

    @property
    def is_scorable(self) -> bool:
        """Whether the episode says anything about the policy: it was played, and did not fail."""
        return bool(self.transitions) and self.stop_reason not in _FAILURES


ROLE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""What a role of a program may be called."""
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories to a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, whole or not at all.

    Raises:
        DataError: If the suffix is another.
    """
    check_kind(path)
    records = [_trajectory_record(trajectory) for trajectory in trajectories]
    if not any(record["env"] for record in records):  # older versions read it, too
        records = [{k: v for k, v in record.items() if k != "env"} for record in records]
    with atomic_path(path) as temporary:
        if temporary.suffix == ".parquet":
            _write_parquet(temporary, records)
            return
        # ASCII, so that lone surrogates survive
        lines = "".join(json.dumps(record, default=_plain) + "\n" for record in records).encode()
        temporary.write_bytes(gzip.compress(lines) if temporary.suffix == ".gz" else lines)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Read what `save_trajectories` wrote; equal to what was written, bit by bit.

    Raises:
        DataError: If the file cannot be read or a row is no trajectory; names file and row.
    """
    check_kind(path)
    is_parquet = str(path).endswith(".parquet")
    trajectories = []
    for number, record in enumerate(read_records(path), start=1):
        try:
            trajectories.append(_trajectory(_convert(record, json.loads) if is_parquet else record))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, row {number}: is no trajectory ({type(error).__name__}: {error})."
            ) from None
    return trajectories


def check_kind(path: str | Path) -> None:
    """Refuse a file in which no trajectories are kept, by its ending.

    Raises:
        DataError: Names the endings there are.
    """
    if not str(path).endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(SUFFIXES)}.")


def _trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    return _fields(trajectory) | {"transitions": [*map(_transition_record, trajectory.transitions)]}


def _transition_record(transition: Transition) -> dict[str, Any]:
    # float32 -> float64 -> JSON -> float64 -> float32 loses nothing
    logprobs = np.asarray(transition.logprobs, np.float32).astype(float).tolist()
    return _fields(transition) | {"logprobs": logprobs}


def _fields(item: Transition | Trajectory) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    steps = [
        Transition(**{**step, "logprobs": np.array(step["logprobs"], np.float32)})
        for step in record[_STEPS]
    ]
    stop_reason = StopReason(record["stop_reason"])
    return Trajectory(**{**record, _STEPS: steps, "stop_reason": stop_reason})


def _plain(value: Any) -> Any:
    """Return what `value` is in JSON; environments put numpy numbers and dataclasses into info."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return repr(value)


# In Parquet, tokens and flags are columns; what an environment or a model may fill as it likes is
# JSON text, because Parquet's strings hold no lone surrogates and its structs no free keys.
_STEPS: Final = "transitions"
_COLUMNS: Final = ("prompt_ids", "completion_ids", "logprobs", "terminated", "truncated")


def _convert(record: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Convert what is JSON text in Parquet, to it or back."""
    converted = {k: v if k in _COLUMNS else convert(v) for k, v in record.items() if k != _STEPS}
    if _STEPS in record:
        converted[_STEPS] = [_convert(step, convert) for step in record[_STEPS]]
    return converted


def _write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    integers, reals, flag = pa.list_(pa.int64()), pa.list_(pa.float32()), pa.bool_()
    kinds = dict(zip(_COLUMNS, (integers, integers, reals, flag, flag), strict=True))
    names = [field.name for field in dataclasses.fields(Transition)]
    transition = pa.struct([(name, kinds.get(name, pa.string())) for name in names])
    names = [f.name for f in dataclasses.fields(Trajectory) if all(f.name in r for r in records)]
    steps = pa.list_(transition)
    schema = pa.schema([(name, steps if name == _STEPS else pa.string()) for name in names])
    write = functools.partial(json.dumps, default=_plain)
    table = pa.Table.from_pylist([_convert(record, write) for record in records], schema=schema)
    pyarrow.parquet.write_table(table, path)
