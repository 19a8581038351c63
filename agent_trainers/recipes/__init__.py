"""Recipes: complete settings by name, one YAML file each; Accelerate's are in ``accelerate/``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

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
"""File in a model's folder: the default settings to train it with."""
MAX_RUNS: Final = 20
RUN_SETTINGS: Final = "settings.json"
"""File in a run's folder: the settings it was trained with."""


def find_settings(table: Mapping[str, Path], name_or_path: str, *, kind: str) -> Path:
    """Return the file of a path, or of a name in a table; errors say what `kind` of file it is."""
    path = Path(name_or_path)
    return path if path.is_file() else lookup(table, name_or_path, kind=f"file or name of {kind}")


def find_recipe(model: str | None) -> Path:
    """Return the recipe of a model: ``default`` for the embedded policy (None).

    Else the recipe in the model's folder or in that of the model its run began with, or
    ``language_model``.
    """
    if model is None:
        return RECIPES["default"]
    for path, settings in _settings_of(model):
        if path.name == MODEL_RECIPE:
            return path
        if "model" in settings and settings["model"] is None:
            return RECIPES["default"]
    return RECIPES["language_model"]


def find_turn_length(model: str) -> tuple[int, Path] | None:
    """Return the longest turn that a model was trained for, and the file that says so, if known.

    Looks into the settings of the run in the model's folder, its recipe, then at the model that the
    run began with, since a warm start samples no turns.
    """
    for path, settings in _settings_of(model):
        tokens = settings.get("max_completion_length")
        if type(tokens) is int and tokens >= 1:
            return tokens, path
    return None


def find_environment(model: str | None) -> tuple[Mapping[str, Any], Path | None]:
    """Return the settings that name the environment or program of a model, and their file."""
    for path, settings in _settings_of(model):
        if any(settings.get(name) for name in ("env", "envs", "program")):
            return settings, path
    return {}, None


def _settings_of(model: str | None) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the settings files of a model's folder, then of the model its run began with."""
    began_with: Any = model
    for _ in range(MAX_RUNS):
        if not isinstance(began_with, str) or not (folder := Path(began_with)).is_dir():
            return
        if folder.resolve().name.startswith("checkpoint-"):
            folder = folder.resolve().parent
        began_with = None
        for name in (RUN_SETTINGS, MODEL_RECIPE):
            if not (folder / name).exists():
                continue
            try:  # JSON is YAML
                settings = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
                began_with = began_with or settings.get("model")
            except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
                raise ConfigurationError(
                    f"{folder / name}: is no file of settings ({' '.join(str(error).split())}). "
                    "Restore or delete it."
                ) from None
            yield folder / name, settings
