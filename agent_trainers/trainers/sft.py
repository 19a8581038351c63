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
    """Return rows for ``SFTTrainer`` whose labels are the tokens of actions.

    Steps that extend each other share a row, as in reinforcement learning.

    Args:
        trajectories: Demonstrations.
        max_length: Longest row in tokens. Longer ones are left out: a truncated row would teach to
            stop early.

    Returns:
        ``input_ids`` and ``labels``, and the number of rows left out.

    Raises:
        DataError: If no row is left.
    """
    kept: list[dict[str, list[int]]] = []
    num_too_long = 0
    for number, trajectory in enumerate(trajectories):
        for row in make_rows(trajectory, number):
            input_ids = [*row.prompt_ids, *row.completion_ids]
            if max_length is not None and len(input_ids) > max_length:
                num_too_long += 1
                continue
            kept.append({"input_ids": input_ids, "labels": row.labels()})
    if not kept:
        raise DataError(
            f"No demonstration is left to train on: {num_too_long} rows are "
            f"longer than max_length={max_length}."
        )
    return Dataset.from_list(kept), num_too_long
