"""Batches whose advantages are known, and their way to files and back.

A file is JSON Lines, a batch a line; `CreditBatch` and `CreditEpisode` say what the fields are.
"""

import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_envs.data.files import atomic_path
from agent_envs.data.records import read_records
from agent_envs.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditEpisode:
    """An episode of a policy, as estimators see it, with what is true of its steps.

    A branch is an episode with ``start`` above 0; nothing is known of its steps.
    """

    group_id: str
    """Episodes with the same id are of the same task, from the same first state."""
    rewards: list[float]
    """Reward of each step, shape (S,)."""
    lengths: list[int]
    """Tokens of each action, shape (S,)."""
    anchors: list[str]
    """A digest of what was observed before each step, shape (S,); equal where that is."""
    is_truncated: bool = False
    """Whether the episode was cut off."""
    is_scorable: bool = True
    """Whether it counts."""
    start: int = 0
    """The first step that it does not share with the episode it branched off."""
    values: list[list[float]] = field(default_factory=list)
    """A critic's value before each token of each step; fitted to other episodes of the policy."""
    states: list[str] = field(default_factory=list)
    """A digest of the state before each step, shape (S,); equal where task, actions and all that is
    shown are."""
    advantages: list[float] = field(default_factory=list)
    """The true advantage of each step, shape (S,): ``r_t + V(s_{t+1}) - V(s_t)``, undiscounted,
    with the mean return of branches for V and 0 after the last step."""
    standard_errors: list[float] = field(default_factory=list)
    """How far each may be off, shape (S,)."""
    halves: list[list[float]] = field(default_factory=list)
    """The same from two halves of the branches, shape (2, S)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditBatch:
    """Groups of episodes that one policy played."""

    environment: str
    """Its name in the benchmark, or a Gymnasium id."""
    stage: str
    """How far the policy was trained."""
    seed: int
    """Seed of its training and of the batch."""
    success: float
    """The share of the batch's episodes that succeeded."""
    reliability: float
    """The share of the variance of `CreditEpisode.advantages` that is no noise; by halves."""
    reliability_by_variance: float
    """The same by the standard errors."""
    costs: dict[str, float]
    """Environment steps: ``episode_steps``, ``branch_steps`` (of the branches that estimators see)
    and ``truth_steps``; ``truth_tokens``; ``truth_branches``; ``seconds``."""
    episodes: list[CreditEpisode]
    """Episodes, then branches."""


def save_batches(path: str | Path, batches: Iterable[CreditBatch]) -> None:
    """Write batches to a ``.jsonl`` or ``.jsonl.gz`` file, whole or not at all."""
    lines = "".join(json.dumps(dataclasses.asdict(batch)) + "\n" for batch in batches).encode()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        is_packed = str(path).endswith(".gz")
        temporary.write_bytes(gzip.compress(lines, mtime=0) if is_packed else lines)


def load_batches(path: str | Path) -> list[CreditBatch]:
    """Read what `save_batches` wrote.

    Raises:
        DataError: If the file cannot be read, or a row is no batch; names file, row and field.
    """
    batches = []
    for number, record in enumerate(read_records(path), start=1):
        place = f"{path}, row {number}"
        record = _checked(record, CreditBatch, place)
        episodes = [
            CreditEpisode(**_checked(each, CreditEpisode, f"{place}, episode {i}"))
            for i, each in enumerate(record["episodes"], start=1)
        ]
        batch = CreditBatch(**{**record, "episodes": episodes})
        _check_shapes(batch.episodes, place)
        batches.append(batch)
    return batches


def _checked(record: Any, kind: type, place: str) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be an object, not {type(record).__name__}.")
    for name, each in fields.items():
        is_needed = each.default is dataclasses.MISSING and (
            each.default_factory is dataclasses.MISSING
        )
        if name not in record and is_needed:
            raise DataError(f"{place}: field {name!r} is missing (found: {', '.join(record)}).")
    if unknown := [name for name in record if name not in fields]:
        raise DataError(f"{place}: there is no field {unknown[0]!r}; they are {', '.join(fields)}.")
    return record


def _check_shapes(episodes: Sequence[CreditEpisode], place: str) -> None:
    for i, episode in enumerate(episodes, start=1):
        per_step: dict[str, Sequence[Any]] = {
            "lengths": episode.lengths,
            "anchors": episode.anchors,
            **({"values": episode.values} if episode.values else {}),
        }
        if episode.advantages:
            per_step |= {
                "advantages": episode.advantages,
                "standard_errors": episode.standard_errors,
                **{f"halves[{half}]": values for half, values in enumerate(episode.halves)},
            }
        for name, values in per_step.items():
            if len(values) != len(episode.rewards):
                raise DataError(
                    f"{place}, episode {i}: {name!r} must hold one entry for each of its "
                    f"{len(episode.rewards)} steps; it has {len(values)}."
                )
