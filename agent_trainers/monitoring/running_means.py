"""Means over the tokens of a micro-batch, whichever pieces and processes they are in."""

from typing import Any

import torch


class Shares:
    """Quotients of sums, and maxima, noted piece by piece and gathered once."""

    def __init__(self, accelerator: Any) -> None:
        """Gather through `accelerator`."""
        self._accelerator = accelerator
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, float] = {}

    def note(self, name: str, part: Any, whole: Any = 1.0) -> None:
        """Note a part and the whole that it is a share of."""
        share = torch.tensor([float(part), float(whole)])
        self._sums[name] = self._sums.get(name, torch.zeros(2)) + share

    def note_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Note a mean over the tokens in `mask`."""
        self.note(name, (values.detach() * mask).sum(), mask.sum())

    def note_maximum(self, name: str, value: float) -> None:
        """Note a value of which the largest counts."""
        self._maxima[name] = max(self._maxima.get(name, value), value)

    def gather(self) -> dict[str, float]:
        """Return what all processes noted since the last call; each notes the same names."""
        own = torch.stack(list(self._sums.values()))
        noted = torch.cat([own.flatten(), torch.tensor(list(self._maxima.values()))])
        gathered = self._accelerator.gather(noted.to(self._accelerator.device)[None])  # (P, N)
        sums = gathered[:, : own.numel()].sum(dim=0).reshape(own.shape).tolist()
        shares = {
            name: part / whole if whole else 0.0
            for name, (part, whole) in zip(self._sums, sums, strict=True)
        }
        maxima = gathered[:, own.numel() :].amax(dim=0).tolist() if self._maxima else []
        shares |= dict(zip(self._maxima, maxima, strict=True))
        self._sums.clear()
        self._maxima.clear()
        return shares
