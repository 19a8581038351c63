"""Trajectories: pure data without models or tensors, and their files.

Sampled tokens are stored with their log-probabilities: they are the tokens that are trained.
"""

import dataclasses
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pydantic

from agent_envs.core.command_line import refusal
from agent_envs.core.messages import Message
from agent_envs.core.replay import ReplayedStep, replay
from agent_envs.data.files import atomic_path
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError, DataError


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """Terminated: the agent answered, or the task is done."""
    TURN_LIMIT = "turn_limit"
    """Truncated: no turns were left."""
    TOKEN_LIMIT = "token_limit"  # noqa: S105 - not a password
    """Truncated: a turn reached the token limit."""
    CONTEXT_OVERFLOW = "context_overflow"
    """Truncated: the state outgrew the policy's context."""
    TIMEOUT = "timeout"
    """Failed: the environment did not return in time."""
    ENVIRONMENT_ERROR = "environment_error"
    """Failed: the environment raised, or returned a malformed result."""
    POLICY_ERROR = "policy_error"
    """Failed: the policy returned no action, such as an unreachable server."""


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return float(value) if isinstance(value, bool) else value


LARGEST_REWARD: Final = 1e15
"""Largest absolute reward: the squares of a batch are finite in single precision."""
TaskKey = tuple[str, str, int | None]
"""Environment, id and index of a task; an id alone may repeat in a data set."""
Number = Annotated[pydantic.FiniteFloat, pydantic.Strict(), pydantic.BeforeValidator(_plain)]
"""A finite number, numpy's and booleans included."""
Reward = Annotated[Number, pydantic.Field(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
"""A `Number` of at most `LARGEST_REWARD`."""
_FAILURES: Final = (StopReason.TIMEOUT, StopReason.ENVIRONMENT_ERROR, StopReason.POLICY_ERROR)
_TRUNCATIONS: Final = (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One environment step: a state, an action and its outcome."""

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
    """Whether the episode was cut off here although the task is not over."""
    info: dict[str, Any]
    """``info`` of the step, without messages and tools."""

    @property
    def role(self) -> str:
        """Role that acted, in a program or an environment; empty without roles."""
        return str(self.info.get("agent_role", ""))

    @property
    def is_frozen(self) -> bool:
        """Whether the step is not trained, because its role is frozen."""
        return bool(self.info.get("is_frozen", False))

    def __eq__(self, other: object) -> bool:
        """Compare every field, log-probabilities bitwise."""
        return isinstance(other, Transition) and _text(self) == _text(other)


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
    """Metrics of the environment at the end."""
    timings: dict[str, float]
    """Seconds by kind of work."""
    stop_reason: StopReason
    """Why the episode ended."""
    error: str | None = None
    """Text of the error, if the episode failed."""
    final_prompt_ids: list[int] = field(default_factory=list)
    """Tokens of the state after the last step of a truncated episode, whose value a critic gives;
    up to the last action if that state does not fit."""
    usage: dict[str, int] = field(default_factory=dict)
    """Use of the model: ``calls``, ``prompt_tokens``, ``completion_tokens``."""
    step_seconds: list[float] = field(default_factory=list, compare=False)
    """Seconds of each environment step, shape (S,); empty if not measured."""
    env: str = ""
    """The name of the environment, where there are several."""
    env_id: str = ""
    """The id that `gym.make` made the environment of; empty for a program or another function."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its arguments as JSON; of an object that JSON cannot hold the ``repr``."""
    task: int | None = None
    """The index of the task in the environment; None if it was drawn by `seed`."""
    seed: int | None = None
    """Seed of the reset, from which its actions can be replayed; None outside of environments."""
    start: int = 0
    """The first own step of a branch, which shares the steps before with another episode; they are
    not part of `usage` and `timings`."""

    def make_env(self, **kwargs: Any) -> gym.Env[str, str]:
        """Make its environment again; `kwargs` have priority over the recorded arguments.

        Raises:
            ConfigurationError: If the trajectory has no `env_id`.
        """
        if not self.env_id:
            raise ConfigurationError(
                f"The trajectory of task {self.task_id!r} has no env_id, as of a program or of "
                "an earlier version. Name its environment, on a command line by --env."
            )
        return gym.make(self.env_id, **self.env_kwargs | kwargs)

    def replay(
        self, env: gym.Env[str, str], step: int, timeout: float | None = None
    ) -> Iterator[ReplayedStep]:
        """Bring `env` to the state before `step` by the recorded actions, and yield each result.

        Raises:
            ReplayError: If rewards or messages differ from the recorded ones.
        """
        return replay(
            env,
            self.seed,
            self.task,
            [each.action for each in self.transitions[:step]],
            rewards=self.rewards[:step],
            messages=[each.messages for each in self.transitions[: step + 1]],
            timeout=timeout,
        )

    @property
    def task_key(self) -> TaskKey:
        """Key that identifies the task."""
        return self.env, self.task_id, self.task

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
    def states(self) -> list[str]:
        """Digest of the history before each step, shape (S,): task, actions and messages."""
        digest = json.dumps([self.env, self.task_id, self.task])
        digests, action, known = [], "", list[Message]()
        for step in self.transitions:
            # only new messages, unless the context was rewritten: linear in the episode's length
            first = len(known) if step.messages[: len(known)] == known else 0
            parts = [digest, action, first, step.messages[first:]]
            text = json.dumps(parts, sort_keys=True, default=repr)
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            digests.append(digest)
            action, known = step.action, step.messages
        return digests

    @property
    def reward_terms(self) -> list[dict[str, float]]:
        """Terms of the reward of each step by name, shape (S,)."""
        return [transition.reward_terms for transition in self.transitions]

    @property
    def return_(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(sum(self.rewards))

    @property
    def success(self) -> bool:
        """Whether the environment counts the episode as a success."""
        return self.metrics.get("success", 0.0) > 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was cut off before its end."""
        return self.stop_reason in _TRUNCATIONS

    @property
    def is_scorable(self) -> bool:
        """Whether the episode has steps and did not fail."""
        return bool(self.transitions) and self.stop_reason not in _FAILURES


ROLE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Valid name of a role of a program."""
TRAJECTORIES_FILE: Final = "trajectories.jsonl.gz"
"""Name of the trajectory file in a run folder."""
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories to a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, atomically.

    Raises:
        DataError: If the suffix is another.
    """
    check_kind(path)
    records = [_fields(trajectory) for trajectory in trajectories]
    with atomic_path(path) as temporary:
        if temporary.suffix == ".parquet":
            _write_parquet(temporary, records)
            return
        # ASCII, so that lone surrogates survive
        lines = "".join(
            json.dumps(record, default=plain_value) + "\n" for record in records
        ).encode()
        temporary.write_bytes(gzip.compress(lines) if temporary.suffix == ".gz" else lines)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Read a file of `save_trajectories`, or that of a run's folder; bitwise identical.

    Raises:
        DataError: If the file cannot be read or a row is no trajectory; names file and row.
    """
    path = Path(path) / TRAJECTORIES_FILE if Path(path).is_dir() else Path(path)
    check_kind(path)
    is_parquet = str(path).endswith(".parquet")
    trajectories = []
    for number, record in enumerate(read_records(path), start=1):
        try:
            record = {k: json.loads(v) for k, v in record.items()} if is_parquet else record
            _Record.model_validate(record)
            trajectories.append(_trajectory(record))
        except pydantic.ValidationError as error:
            place = f"{path}, row {number}: not a trajectory"
            raise DataError(str(refusal(place, error))) from None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, row {number}: not a trajectory ({type(error).__name__}: {error})."
            ) from None
    return trajectories


def check_kind(path: str | Path) -> None:
    """Raise a DataError that names the known suffixes if a file has another."""
    if not str(path).endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file. Use one of {', '.join(SUFFIXES)}.")


def _text(transition: Transition) -> str:
    return json.dumps(_fields(transition), default=plain_value, sort_keys=True)


def _fields(item: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(item)]
    return {name: _with_text_keys(getattr(item, name)) for name in names}


def _with_text_keys(value: Any) -> Any:
    """Return a value whose keys are text: JSON has no others, such as positions on a board."""
    if isinstance(value, dict):
        return {_text_key(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and set(map(type, value)) != {int}:  # many token ids
        return [_with_text_keys(item) for item in value]
    return value


def _text_key(key: Any) -> str:
    key = key.item() if isinstance(key, np.generic) else key
    if isinstance(key, str):
        return key
    return json.dumps(key) if key is None or isinstance(key, int | float) else repr(key)


_Number = Annotated[float, pydantic.Strict()] | pydantic.StrictBool
_Ids = list[Annotated[int, pydantic.Field(ge=0, strict=True)]]


class _Message(pydantic.BaseModel):
    role: str
    content: Any


class _Step(pydantic.BaseModel):
    messages: Annotated[list[_Message], pydantic.Field(min_length=1)]
    prompt_ids: _Ids
    completion_ids: _Ids
    action: str
    reward: _Number
    reward_terms: dict[str, _Number]
    info: dict[str, Any]


class _Record(pydantic.BaseModel):
    """Types of the fields of a file; `Trajectory` refuses other fields."""

    task_id: str
    group_id: str
    transitions: list[_Step]
    metrics: dict[str, _Number]
    env_id: str = ""
    env_kwargs: dict[str, Any] = {}
    task: int | None = None
    seed: int | None = None


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    steps = [
        Transition(**{**step, "logprobs": np.array(step["logprobs"], np.float32)})
        for step in record["transitions"]
    ]
    for step in steps:
        if step.logprobs.shape != (len(step.completion_ids),):
            raise ValueError("logprobs must be one number per token of completion_ids")
    stop_reason = StopReason(record["stop_reason"])
    return Trajectory(**{**record, "transitions": steps, "stop_reason": stop_reason})


def plain_value(value: Any) -> Any:
    """Return a JSON value; environments put numpy numbers and dataclasses into info."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()  # float32 -> float64 -> JSON -> float64 -> float32 loses nothing
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return repr(value)


def _write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a column of JSON per field: Parquet's strings cannot hold lone surrogates."""
    import pyarrow as pa
    import pyarrow.parquet

    names = [field.name for field in dataclasses.fields(Trajectory)]
    columns = [
        [json.dumps(record[name], default=plain_value) for record in records] for name in names
    ]
    arrays = [pa.array(column, pa.string()) for column in columns]
    pyarrow.parquet.write_table(pa.table(arrays, names), path)
