"""Complete, runnable settings by name, one YAML file each; Accelerate's are in ``accelerate/``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent_envs.core.lookup import lookup

FOLDER: Final = Path(__file__).parent
RECIPES: Final[Mapping[str, Path]] = {
    name: FOLDER / f"{name}.yaml"
    for name in ("default", "language_model", "hotpotqa_grpo", "hotpotqa_grpo_server")
}
"""Settings of ``agent-r1-train``."""
ACCELERATE_CONFIGS: Final[Mapping[str, Path]] = {
    name: FOLDER / "accelerate" / f"{name}.yaml" for name in ("ddp", "deepspeed_zero3", "fsdp2")
}
"""Settings of ``accelerate launch``."""
MODEL_RECIPE: Final = "recipe.yaml"
"""File in a model's folder: the settings to train it with, where no others are asked for."""


def find_settings(table: Mapping[str, Path], name_or_path: str, *, kind: str) -> Path:
    """Return the file that is meant: one's own, or one of a table.

    Args:
        table: Files by name.
        name_or_path: Which.
        kind: What is looked for, for the message.

    Raises:
        UnknownNameError: If there is neither such a file nor such a name; says which there are.
    """
    path = Path(name_or_path)
    return path if path.is_file() else lookup(table, name_or_path, kind=kind)
