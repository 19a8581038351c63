"""Supervised fine-tuning on demonstrations, with the rows of reinforcement learning."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from datasets import Dataset
from trl import SFTConfig

from agent_envs.errors import DataError
from agent_trainers.batching.rows import make_rows
from agent_trainers.trainers.config import TRAINER_RANGES, Ranges, check_ranges, follow_the_machine
from agent_trainers.trajectory import Trajectory

_RANGES: Final[Ranges] = {**TRAINER_RANGES, "positive": (lambda x: x > 0, ("max_length",))}


@dataclass
class WarmStartConfig(SFTConfig):  # type: ignore[misc] # TRL is untyped
    """``trl.SFTConfig`` with device and precision of the machine as defaults."""

    def __post_init__(self) -> None:
        """Set device and precision defaults, and check ranges."""
        follow_the_machine(self)
        super().__post_init__()
        check_ranges(self, _RANGES)


def supervised_dataset(
    trajectories: Iterable[Trajectory], max_length: int | None
) -> tuple[Dataset, int]:
    """Return rows for ``SFTTrainer``, labels on actions only, and the number of rows left out.

    Steps that extend each other share a row, as in reinforcement learning. Rows longer than
    `max_length` are left out: a truncated row would teach to stop early.
    """
    rows = [row for i, t in enumerate(trajectories) for row in make_rows(t, i)]
    data = [
        {"input_ids": [*row.prompt_ids, *row.completion_ids], "labels": row.labels()}
        for row in rows
    ]
    kept = [each for each in data if max_length is None or len(each["labels"]) <= max_length]
    if not kept:
        raise DataError(
            f"No demonstration is left to train on: {len(data)} rows are longer than "
            f"max_length={max_length}."
        )
    return Dataset.from_list(kept), len(data) - len(kept)
