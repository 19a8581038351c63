"""Means over the tokens of a batch, whichever micro-batches and processes they are in."""

from typing import Any

import torch


class RunningMeans:
    """Quotients of sums, and maxima: noted by micro-batch, gathered once."""

    def __init__(self, accelerator: Any) -> None:
        """Gather through `accelerator`."""
        self._accelerator = accelerator
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, part: Any, whole: Any = 1.0) -> None:
        """Add to the two sums whose quotient is wanted."""
        sums = torch.tensor([float(part), float(whole)])
        self._sums[name] = self._sums.get(name, torch.zeros(2)) + sums

    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add values of the tokens in `mask`, whose mean is wanted."""
        self.add(name, (values.detach() * mask).sum(), mask.sum())

    def add_maximum(self, name: str, value: float) -> None:
        """Add a value of which the largest counts."""
        self._maxima[name] = max(self._maxima.get(name, value), value)

    def gather(self) -> dict[str, float]:
        """Return what all processes added since the last call; each adds the same names."""
        own = torch.stack(list(self._sums.values()))
        added = torch.cat([own.flatten(), torch.tensor(list(self._maxima.values()))])
        gathered = self._accelerator.gather(added.to(self._accelerator.device)[None])  # (P, N)
        sums = gathered[:, : own.numel()].sum(dim=0).reshape(own.shape).tolist()
        means = {
            name: part / whole if whole else 0.0
            for name, (part, whole) in zip(self._sums, sums, strict=True)
        }
        maxima = gathered[:, own.numel() :].amax(dim=0).tolist() if self._maxima else []
        means |= dict(zip(self._maxima, maxima, strict=True))
        self._sums.clear()
        self._maxima.clear()
        return means
