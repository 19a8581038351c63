"""Models by a name on the hub or a folder.

Torch and transformers are imported only to load a model, so that `check_model` is fast.
"""

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # not in __all__

from agent_envs.errors import ConfigurationError
from agent_trainers.tiny_policy import TINY_POLICY

EMBEDDED: Final = "embedded policy"
"""Name of the default model in results."""

_VALID_NAMES: Final = "a name on the hub, or a folder that save_pretrained wrote"
_CONFIGS: Final = ("config.json", "adapter_config.json")
"""Every folder of a model has one of them."""
_GENERATION: Final = "generation_config.json"
_SMALL: Final = 2_000_000
"""Parameters below which more threads do not speed up a model."""
_BF16_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16")


def model_path(options: Any) -> str:
    """Return the model of a command's options as transformers loads it."""
    return check_model(str(TINY_POLICY) if options.model is None else options.model)


def check_model(name: str) -> str:
    """Return `name` if it can be that of a model, without access to the hub."""
    path = Path(name)
    if name and path.exists():
        if not any((path / config).is_file() for config in _CONFIGS):
            raise _error(name, f"it is no folder with a {_CONFIGS[0]}")
        try:  # transformers ignores a damaged one, and with it the tokens that end a turn
            json.loads((path / _GENERATION).read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            raise _error(name, f"{_GENERATION} is not valid JSON ({error})") from None
        return name
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise _error(name, f"{_missing(path)}, and it is no valid name on the hub") from None
    if path.parent != Path() and path.parent.is_dir():  # offline, a look-up takes a minute
        raise _error(name, f"{_missing(path)}, but {path.parent} exists")
    return name


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model, with padding on the left."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, name, padding_side="left")


def load_model(name: str, dtype: str = "auto") -> Any:
    """Load a causal language model with weights of `dtype`, ``"auto"`` for the saved one."""
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, name, dtype=dtype)


def fast_precision() -> Mapping[str, bool]:
    """Return ``{"bf16": True}`` where the model has to run on a CPU with bf16 instructions."""
    import torch

    if torch.accelerator.is_available():
        return {}
    can: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.9 on
    return {"bf16": True} if any(can.get(name) for name in _BF16_INSTRUCTIONS) else {}


def keep_to_one_thread(model: Any) -> None:
    """Compute a small model on a CPU with one thread, unless OMP_NUM_THREADS is set."""
    import torch

    weights = list(model.parameters())
    is_small = sum(tensor.numel() for tensor in weights) < _SMALL
    on_cpu = all(tensor.device.type == "cpu" for tensor in weights)
    if is_small and on_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _missing(path: Path) -> str:
    near = get_close_matches(path.name, [each.name for each in path.parent.glob("*")], 1)
    hint = f" (did you mean {path.with_name(near[0])}?)" if near else ""
    return f"there is no such folder{hint}"


def _load(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # types of models and files raise many kinds of errors
        is_here = "" if (path := Path(name)).exists() else f"{_missing(path)}, and "
        reason = f"{is_here}{kind.__name__} could not load it ({' '.join(str(error).split())})"
        raise _error(name, reason) from error


def _error(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"Model {name}: {reason}. Pass {_VALID_NAMES}.")
