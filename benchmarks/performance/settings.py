"""How much is measured: the real thing by default, next to nothing in a test."""

from dataclasses import dataclass
from typing import Any, Final

from benchmarks.performance.models import EMBEDDED

SEED: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of everything that `benchmarks.performance.training` measures."""

    device: str = "cpu"
    """``"cpu"`` or ``"cuda"``."""
    rounds: int = 5
    """Pairs per comparison."""
    step_model: str = EMBEDDED
    """Whose optimiser step is measured; any but the embedded policy follows a script."""
    language_model: str | None = None
    """Folder of a model that TRL can read calls of; None for SmolLM2."""
    gradient_model: str = "1.5M"
    """Whose gradients are, on merged rows and on a row per step, and whose memory."""
    num_questions: int = 16
    num_generations: int = 8
    num_steps: tuple[int, ...] = (4, 8, 16)
    """Lengths of the trajectories whose rows are merged."""
    memory_steps: tuple[int, ...] = (1, 4, 8, 16)
    num_trajectories: int = 8
    """Synthetic trajectories per batch."""
    token_budget: int = 4096
    """``max_tokens_per_micro_batch``."""
    num_episodes: int = 64
    """Episodes with slow tools."""
    num_calls: int = 5
    """Calls of each of them."""
    fast_seconds: float = 0.01
    slow_seconds: float = 2.0
    slow_share: float = 0.05

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Settings of every trainer: what follows from the device, and silence."""
        is_cpu = self.device == "cpu"
        silence = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
        return {"use_cpu": is_cpu, "bf16": not is_cpu, "gradient_checkpointing": False} | silence


DEVICE_DEFAULTS: Final = {
    "cpu": Settings(),
    "cuda": Settings(
        device="cuda",
        step_model="0.5B",
        gradient_model="0.5B",
        num_trajectories=16,
        token_budget=16_384,
    ),
}
