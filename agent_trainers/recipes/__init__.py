"""Complete, runnable settings by name, one YAML file each; Accelerate's are in ``accelerate/``."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

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
"""File in a model's folder: the settings to train it with, where no others are asked for."""
RUN_SETTINGS: Final = "settings.json"
"""File in a run's folder: the settings that its model was trained by."""
_PARTS_OF_A_RUN: Final = ("checkpoint-*", "merged")
"""Folders in a run's that hold its model, too."""


class TurnLength(NamedTuple):
    """The longest turn that a model was trained for."""

    tokens: int
    source: Path
    """The file that says so."""


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

    Those that `config` names; else ``default``, or with a model the recipe in the model's folder or
    in that of the model its run began with (``default`` for the embedded policy), else
    ``language_model``.

    Raises:
        UnknownNameError: See `find_settings`.
    """
    if config is None and model is not None:
        for folder, run, _ in _ancestors(model):
            if (own := folder / MODEL_RECIPE).is_file():
                return own
            if "model" in run and run["model"] is None:
                return RECIPES["default"]
        return RECIPES["language_model"]
    return find_settings(RECIPES, "default" if config is None else config, kind="--config")


def find_turn_length(model: str) -> TurnLength | None:
    """Return the longest turn that a model was trained for; None where nothing says so.

    Looks for the settings of the run in the model's folder, then for a recipe there, then at the
    model that the run began with: a warm start learns from turns, but takes none.
    """
    for folder, run, recipe in _ancestors(model):
        for path, settings in ((folder / RUN_SETTINGS, run), (folder / MODEL_RECIPE, recipe)):
            tokens = settings.get("max_completion_length")
            if type(tokens) is int and tokens >= 1:
                return TurnLength(tokens, path)
    return None


def _ancestors(model: str) -> Iterator[tuple[Path, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield a model's folder, its run's settings and its recipe; then those of what it began with.

    Settings that are not there are empty.
    """
    folder, seen = Path(model), set[Path]()
    while folder.is_dir() and folder.resolve() not in seen:
        seen.add(folder.resolve())
        if any(fnmatch(folder.resolve().name, part) for part in _PARTS_OF_A_RUN):
            folder = folder.resolve().parent
        run, recipe = _read(folder / RUN_SETTINGS), _read(folder / MODEL_RECIPE)
        yield folder, run, recipe
        began_with = run.get("model") or recipe.get("model")
        folder = Path(began_with) if isinstance(began_with, str) else folder


def _read(path: Path) -> Mapping[str, Any]:
    """Return the settings in a file; none where it holds something else: it may be anybody's."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}
