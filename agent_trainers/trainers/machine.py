"""What TRL's settings are on the machine at hand."""

from collections.abc import Mapping
from typing import Any, Final

import torch

_BF16_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16")


def fast_precision() -> Mapping[str, bool]:
    """Return ``{"bf16": True}`` where the model has to run on a CPU that multiplies in bf16.

    Twice as fast as float32 there, at the price of log-probabilities that differ in the third digit
    between sampling and training: for language models, not for what has to be exact.
    """
    if torch.accelerator.is_available():
        return {}
    can: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.9 on
    return {"bf16": True} if any(can.get(name) for name in _BF16_INSTRUCTIONS) else {}


def follow_the_machine(config: Any) -> None:
    """Without an accelerator use the CPU, and there float32 unless bf16 is asked for.

    TRL's default is bf16, which CPUs without instructions for it refuse or are slower with. To be
    called before TRL's own ``__post_init__``.
    """
    if not torch.accelerator.is_available():
        config.use_cpu = True
    if config.use_cpu and config.bf16 is None:
        config.bf16 = False
