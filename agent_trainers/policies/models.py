"""Models from anywhere: a name on the hub, a folder, or a GGUF file, whose weights are dequantised.

A GGUF file is converted once: beside the other models that this project keeps in its cache there is
then a folder that everything else reads like any other. Torch and transformers are imported where a
model is loaded: that there is none of a name is said without them (`check_model`).
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # not in __all__

from agent_envs.core.lookup import require_extra
from agent_envs.data.files import fsync_file
from agent_envs.errors import ConfigurationError

CACHE_VARIABLE: Final = "AGENT_R1_CACHE"
"""Environment variable: where models that are made are kept."""
_WHAT_IT_IS: Final = "a name on the hub, a folder that save_pretrained wrote, or a GGUF file"
_CONFIGS: Final = ("config.json", "adapter_config.json")
"""One of them is in every folder of a model."""


def cache_folder() -> Path:
    """Return the folder for models that are made: ``$AGENT_R1_CACHE`` or ``~/.cache/agent-r1``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "agent-r1")


def check_model(name: str) -> None:
    """Make sure that a name can be that of a model, as far as this machine tells.

    Raises:
        ConfigurationError: If it is a path where no model lies, no name that the hub could have, or
            one of the hub's that is not in the cache while the hub is out of reach.
    """
    if not name:
        raise ConfigurationError(f"The model's name is empty. Pass {_WHAT_IT_IS}.")
    path = Path(name)
    if path.is_dir():
        if not any((path / config).is_file() for config in _CONFIGS):
            raise ConfigurationError(
                f"Model {name}: the folder holds no {_CONFIGS[0]}. Pass {_WHAT_IT_IS}."
            )
    elif name.endswith(".gguf") or path.exists():
        if not path.is_file():
            raise ConfigurationError(f"Model {name}: there is no such file.")
        if path.suffix != ".gguf":
            raise ConfigurationError(f"Model {name}: is no GGUF file. Pass {_WHAT_IT_IS}.")
    else:
        _check_hub_name(name)


def _check_hub_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigurationError(
            f"Model {name!r}: there is no such folder, and no model on the hub can be called so. "
            f"Pass {_WHAT_IT_IS}."
        ) from None
    cached = (try_to_load_from_cache(name, config) for config in _CONFIGS)
    if constants.HF_HUB_OFFLINE and not any(isinstance(path, str) for path in cached):
        raise ConfigurationError(
            f"Model {name}: there is no such folder, and the hub's model of that name is not in "
            "the cache, while HF_HUB_OFFLINE is set. Check the path, or unset it to download."
        )


def find_model(name: str) -> str:
    """Return a model as transformers loads it: `name` itself, or the folder of a GGUF file.

    Raises:
        MissingExtraError: If a GGUF file is named, and what reads it is not installed.
        ConfigurationError: See `check_model`; or if the file cannot be read.
    """
    check_model(name)
    path = Path(name)
    if path.suffix != ".gguf" or path.is_dir():
        return name
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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
            fsync_file(path)
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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left")
    except Exception as error:  # hundreds of types of models and files raise all kinds
        raise _not_loaded(name, "no tokenizer could be loaded", error) from error


def load_model(name: str, dtype: str = "auto") -> Any:
    """Load a causal language model; `dtype` is that of its weights, ``"auto"`` for the saved one.

    Raises:
        ConfigurationError: If it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except Exception as error:
        raise _not_loaded(name, "could not be loaded", error) from error


def _not_loaded(name: str, what: str, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())
    is_here = "" if Path(name).exists() else "there is no such folder here, and "
    return ConfigurationError(f"Model {name}: {is_here}{what} ({reason}). Pass {_WHAT_IT_IS}.")
