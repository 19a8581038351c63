"""Complete, runnable settings by name, one YAML file each; Accelerate's are in ``accelerate/``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError

FOLDER: Final = Path(__file__).parent
RECIPES: Final[Mapping[str, Path]] = {
    name: FOLDER / f"{name}.yaml"
    for name in ("default", "language_model", "smollm2", "hotpotqa_grpo", "hotpotqa_grpo_server")
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
        ConfigurationError: If a YAML file is named that is not there.
        UnknownNameError: If there is neither such a file nor such a name; says which there are.
    """
    path = Path(name_or_path)
    if path.is_file() or (path.exists() and name_or_path not in table):
        return path  # what is no file is refused where it is read
    if path.suffix in (".yaml", ".yml"):
        raise ConfigurationError(
            f"{kind} {path}: there is no such file. By name there are: {', '.join(table)}."
        )
    return lookup(table, name_or_path, kind=kind)


def find_recipe(config: str | None, model: str | None) -> Path:
    """Return the settings that ``agent-r1-train`` stands on.

    Those that `config` names; else ``default``, or with a model the recipe in the model's folder,
    else ``language_model``.

    Raises:
        UnknownNameError: See `find_settings`.
    """
    if config is None and model is not None:
        own = Path(model) / MODEL_RECIPE
        return own if own.is_file() else RECIPES["language_model"]
    return find_settings(RECIPES, "default" if config is None else config, kind="--config")
