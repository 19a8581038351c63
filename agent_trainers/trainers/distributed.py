"""What processes have to tell each other."""

from typing import Any

import torch


class Ranks:
    """The processes of a run. Every method is collective: all processes must call it."""

    def __init__(self, accelerator: Any) -> None:
        """Talk through `accelerator`."""
        self._accelerator = accelerator

    def each(self, value: int) -> list[int]:
        """Return the value of each process, shape (P,)."""
        tensor = torch.tensor([value], device=self._accelerator.device)
        values: list[int] = self._accelerator.gather(tensor).tolist()
        return values

    def any(self, value: bool) -> bool:
        """Return whether the value of any process is true."""
        return any(self.each(int(value)))

    def num_before(self, count: int) -> int:
        """Return how many the processes before this one hold, if this one holds `count`."""
        return sum(self.each(count)[: self._accelerator.process_index])
