"""What TRL's settings are on the machine at hand."""

from typing import Any

import torch


def follow_the_machine(config: Any) -> None:
    """Without an accelerator use the CPU, and there float32 unless bf16 is asked for.

    TRL's default is bf16, which CPUs without instructions for it refuse or are slower with. To be
    called before TRL's own ``__post_init__``.
    """
    if not torch.accelerator.is_available():
        config.use_cpu = True
    if config.use_cpu and config.bf16 is None:
        config.bf16 = False
