"""Options of a model that is trained, perhaps by its adapters."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from transformers.hf_argparser import HfArg
from trl import ModelConfig, get_quantization_config

from agent_envs.core.command_line import check_range
from agent_envs.errors import AgentEnvsError, ConfigurationError


@dataclass
class ModelArguments(ModelConfig):  # type: ignore[misc] # TRL is untyped
    """TRL's model options, with ``model`` for the name."""

    model: str | None = HfArg(
        default=None, help="Name of a model on the hub, or a folder; default: the embedded policy."
    )
    dtype: str | None = HfArg(
        default="float32",
        help="Type of the weights: float32, bfloat16, float16, or auto for the type they are saved "
        "in. --bf16 and --fp16 set the type of the computation.",
    )
    lora_r: int | None = HfArg(
        default=None, help="Rank of LoRA adapters, which are then trained instead of the model."
    )
    model_name_or_path: str | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        """Derive `use_peft` from `lora_r`; refuse options of adapters without adapters."""
        check_range(self, "at least 1", "lora_r", "lora_alpha")
        if self.lora_r is not None:
            self.use_peft = True
        elif self.use_peft:
            self.lora_r = 16
        super().__post_init__()
        target = getattr(self, "lora_target_modules", None)
        if isinstance(target, str) and target != "all-linear" and target.isidentifier():
            self.lora_target_modules = [target]  # TRL would read a single name as a pattern
        of_adapters = ("lora_", "use_dora", "use_rslora", "load_in_")
        for field in () if self.use_peft else dataclasses.fields(self):
            if field.name.startswith(of_adapters) and getattr(self, field.name) != field.default:
                raise ConfigurationError(
                    f"--{field.name} does nothing without --lora_r: add --lora_r."
                )

    def load_arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained``; those of `given` have priority."""
        chosen = {
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "quantization_config": get_quantization_config(self),
            **(given or {}),
        }
        return {name: value for name, value in chosen.items() if value is not None}


@contextlib.contextmanager
def refused_settings() -> Iterator[None]:
    """Raise errors of libraries that reject a setting as `ConfigurationError`."""
    try:
        yield
    except AgentEnvsError:
        raise
    except (ValueError, ImportError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
