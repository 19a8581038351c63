"""Supervised training on demonstrations: rows as of reinforcement learning for ``SFTTrainer``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from datasets import Dataset
from trl import SFTConfig

from agent_envs.errors import DataError
from agent_trainers.batching.rows import make_rows
from agent_trainers.trainers.grpo_config import TRAINER_RANGES, Ranges, check_ranges
from agent_trainers.trainers.machine import follow_the_machine
from agent_trainers.trajectory import Trajectory

_RANGES: Final[Ranges] = {**TRAINER_RANGES, "positive": (lambda x: x > 0, ("max_length",))}


@dataclass
class WarmStartConfig(SFTConfig):  # type: ignore[misc] # TRL is untyped
    """``trl.SFTConfig``, in the precision that the machine has."""

    def __post_init__(self) -> None:
        """Choose device and precision where they are left open."""
        follow_the_machine(self)
        super().__post_init__()
        check_ranges(self, _RANGES)


def supervised_dataset(
    trajectories: Iterable[Trajectory], max_length: int | None
) -> tuple[Dataset, int]:
    """Return rows for ``SFTTrainer``: the tokens of actions are trained, all others only read.

    Steps that extend each other share a row, as in reinforcement learning.

    Args:
        trajectories: Demonstrations.
        max_length: Longest row in tokens; longer ones are left out, for a half would teach to stop
            in the midst.

    Returns:
        ``input_ids`` and ``labels``, and how many rows were left out.

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
            f"There is nothing to learn from: no demonstration is left, {num_too_long} rows are "
            f"longer than max_length={max_length}."
        )
    return Dataset.from_list(kept), num_too_long
