"""Batches of episodes with known advantages, and their JSON Lines files, one batch per line."""

import base64
import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agent_envs.data.files import atomic_path
from agent_envs.data.records import read_records
from agent_envs.errors import DataError

FORMAT: Final = 2
"""Version of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditEpisode:
    """An episode as estimators see it, with its true advantages.

    A branch is an episode with ``start`` above 0; its true advantages are unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    group_id: str
    """Episodes with the same id have the same task and the same first state."""
    rewards: list[float]
    """Reward of each step, shape (S,)."""
    lengths: list[int]
    """Tokens of each action, shape (S,)."""
    anchors: list[str]
    """Digest of the observation before each step, shape (S,)."""
    states: list[str]
    """Digest of the history before each step, shape (S,): of task, actions and messages."""
    reward_terms: list[dict[str, float]]
    """Terms of the reward of each step by name, shape (S,)."""
    is_truncated: bool = False
    """Whether the episode was truncated."""
    is_scorable: bool = True
    """Whether the episode counts."""
    start: int = 0
    """First step that the episode does not share with the one it branched off."""
    values: list[list[float]] = field(default_factory=list)
    """A critic's value before each token of each step."""
    gradients: list[str] = field(default_factory=list)
    """Gradient of the log-probability of each action, shape (S,): k numbers in a basis of the batch
    that keeps inner products, packed by `pack`."""
    advantages: list[float] = field(default_factory=list)
    """True advantage of each step, shape (S,): ``r_t + V(s_{t+1}) - V(s_t)``, undiscounted, where V
    is the mean return of branches, and 0 after the last step."""
    standard_errors: list[float] = field(default_factory=list)
    """Standard error of each true advantage, shape (S,)."""
    halves: list[list[float]] = field(default_factory=list)
    """True advantages from two halves of the branches, shape (2, S)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditBatch:
    """Groups of episodes of one policy."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    format: int = FORMAT
    """Version of the file."""
    environment: str
    """Name in the benchmark, or a Gymnasium id."""
    stage: str
    """Stage of training of the policy."""
    seed: int
    """Seed of the training and of the batch."""
    success: float
    """Share of successful episodes."""
    reliability: float
    """Share of the variance of the true advantages that is not noise, by split halves."""
    reliability_by_variance: float
    """The same by the standard errors."""
    costs: dict[str, float]
    """Environment steps: ``episode_steps``, ``branch_steps`` (of the branches that estimators see)
    and ``truth_steps``; ``truth_tokens``; ``truth_branches``; ``seconds``."""
    episodes: list[CreditEpisode]
    """Episodes, then branches."""
    gradient_energy: float = 0.0
    """Share of the squared norms of the gradients that the k numbers hold; 0 without gradients."""

    @property
    def measured(self) -> list[CreditEpisode]:
        """Episodes with true advantages."""
        return [episode for episode in self.episodes if episode.start == 0]


def pack(vector: npt.NDArray[np.float64]) -> str:
    """Return a vector as base64 of little-endian float16."""
    return base64.b64encode(vector.astype("<f2").tobytes()).decode()


def unpack(packed: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return vectors of `pack`, (S, k).

    Raises:
        ValueError: If one is not such a text, or their lengths differ.
    """
    rows = [np.frombuffer(base64.b64decode(text, validate=True), "<f2") for text in packed]
    return np.array(rows, float)


_ADAPTER = TypeAdapter(CreditBatch)


def folder_of(environment: str) -> str:
    """Return the name of an environment's folder in the work folder."""
    return "".join(c if c.isalnum() else "_" for c in environment)


def save_batches(path: str | Path, batches: Iterable[CreditBatch]) -> None:
    """Write batches to a ``.jsonl`` or ``.jsonl.gz`` file, atomically."""
    lines = "".join(json.dumps(dataclasses.asdict(batch)) + "\n" for batch in batches).encode()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        is_packed = str(path).endswith(".gz")
        temporary.write_bytes(gzip.compress(lines, mtime=0) if is_packed else lines)


def load_batches(path: str | Path) -> list[CreditBatch]:
    """Read a file of `save_batches`.

    Raises:
        DataError: If the file cannot be read, has another format, or a row is invalid; names file,
            row and field.
    """
    batches = []
    for number, record in enumerate(read_records(path), start=1):
        if (version := record.get("format")) != FORMAT:
            raise DataError(
                f"{path}, row {number}: format {version}, not {FORMAT}. Make the file again with "
                "python -m benchmarks.credit."
            )
        try:
            batch = _ADAPTER.validate_python(record)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}, row {number}: {place}: {first['msg']}.") from None
        for i, episode in enumerate(batch.episodes):
            _check_lengths(episode, f"{path}, row {number}: episodes.{i}")
        try:
            unpack([packed for episode in batch.episodes for packed in episode.gradients])
        except ValueError as error:
            raise DataError(f"{path}, row {number}: episodes: gradients: {error}.") from None
        batches.append(batch)
    return batches


def _check_lengths(episode: CreditEpisode, place: str) -> None:
    per_step: dict[str, Sequence[Any]] = {
        "lengths": episode.lengths, "anchors": episode.anchors, "states": episode.states,
        "reward_terms": episode.reward_terms,
    }  # fmt: skip
    for name in ("values", "gradients"):
        if getattr(episode, name):
            per_step[name] = getattr(episode, name)
    if episode.advantages:
        per_step |= {"advantages": episode.advantages, "standard_errors": episode.standard_errors}
        per_step |= {f"halves.{half}": values for half, values in enumerate(episode.halves)}
    for name, values in per_step.items():
        if len(values) != len(episode.rewards):
            raise DataError(
                f"{place}.{name}: {len(values)} entries for {len(episode.rewards)} steps; give one "
                "per step."
            )
