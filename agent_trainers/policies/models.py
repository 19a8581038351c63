"""Models from anywhere: a name on the hub, a folder, or a GGUF file, whose weights are dequantised.

A GGUF file is converted once: beside the other models that this project keeps in its cache there is
then a folder that everything else reads like any other.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_envs.core.extras import require_extra
from agent_envs.data.files import settle
from agent_envs.errors import ConfigurationError

CACHE_VARIABLE: Final = "AGENT_R1_CACHE"
"""Environment variable: where models that are made are kept."""
_WHAT_IT_IS: Final = "a name on the hub, a folder that save_pretrained wrote, or a GGUF file"


def cache_folder() -> Path:
    """Return the folder for models that are made: ``$AGENT_R1_CACHE`` or ``~/.cache/agent-r1``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "agent-r1")


def find_model(name: str) -> str:
    """Return a model as transformers loads it: `name` itself, or the folder of a GGUF file.

    Raises:
        MissingExtraError: If a GGUF file is named, and what reads it is not installed.
        ConfigurationError: If the file is missing or cannot be read.
    """
    if not name.endswith(".gguf"):
        return name
    path = Path(name)
    if not path.is_file():
        raise ConfigurationError(f"Model {name}: there is no such file.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return str(dequantise(path, cache_folder() / "models" / f"{path.stem}-{digest}"))


def dequantise(path: Path, folder: Path) -> Path:
    """Write the float32 weights and the tokenizer of a GGUF file to `folder`; return it.

    A folder that is there already is left as it is.

    Raises:
        MissingExtraError: If the library ``gguf`` is not installed.
        ConfigurationError: If transformers cannot read the file.
    """
    if folder.exists():
        return folder
    require_extra("gguf", "A GGUF file", "gguf")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigurationError(
            f"Model {path}: transformers cannot read this GGUF file ({error})."
        ) from error
    # What is in memory is no longer quantised, but says so, and would refuse to be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        for path in unfinished.iterdir():
            settle(path)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model, padding on the left.

    Raises:
        ConfigurationError: If it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Model {name}: no tokenizer could be loaded ({error}). Pass {_WHAT_IT_IS}."
        ) from error


def load_model(name: str, dtype: str = "auto") -> Any:
    """Load a causal language model; `dtype` is that of its weights, ``"auto"`` for the saved one.

    Raises:
        ConfigurationError: If it cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Model {name}: could not be loaded ({error}). Pass {_WHAT_IT_IS}."
        ) from error
