"""Options of the trained model and its adapters, and the check that it fits the environment."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg
from trl import ModelConfig, get_peft_config, get_quantization_config

from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.checkpointing.checkpoints import flush
from agent_trainers.cli.arguments import check_range
from agent_trainers.cli.environments import EnvironmentFacts
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import template_tools

EMBEDDED: Final = "embedded policy"
"""Name of the default model in results."""
MAX_UNKNOWN_SHARE: Final = 0.1
MERGED_FOLDER: Final = "merged"


@dataclasses.dataclass
class ModelArguments(ModelConfig):  # type: ignore[misc] # TRL is untyped
    """TRL's model options, with ``model`` for the name."""

    model: str | None = HfArg(
        default=None,
        help="A causal language model: its name on the hub, a folder, or a GGUF file. The embedded "
        "policy if not given.",
    )
    dtype: str | None = HfArg(
        default="float32",
        help="Type of the model's weights: float32, bfloat16, float16, or auto for the type they "
        "are saved in. --bf16 and --fp16 set the type of the computation.",
    )
    lora_r: int | None = HfArg(
        default=None,
        help="Rank of LoRA adapters, which are then trained instead of the whole model; 16 with "
        "--use_peft alone.",
    )
    merge_adapter: bool = HfArg(
        default=False,
        help=f"Also write the model with its adapters merged to {MERGED_FOLDER}/ in output_dir.",
    )
    model_name_or_path: str | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        """Derive `use_peft` from `lora_r`; refuse options of adapters without adapters."""
        check_range(self, "at least 1", lambda value: value >= 1, "lora_r")
        if self.lora_r is not None:
            self.use_peft = True
        elif self.use_peft:
            self.lora_r = 16
        super().__post_init__()
        target = getattr(self, "lora_target_modules", None)
        if isinstance(target, str) and target != "all-linear" and target.isidentifier():
            self.lora_target_modules = [target]  # TRL would read a single name as a pattern
        of_adapters = ("lora_", "use_dora", "use_rslora", "load_in_", "merge_adapter")
        for field in () if self.use_peft else dataclasses.fields(self):
            if field.name.startswith(of_adapters) and getattr(self, field.name) != field.default:
                raise ConfigurationError(
                    f"--{field.name} does nothing without --lora_r: add --lora_r."
                )

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of the trainers."""
        return {
            "peft_config": get_peft_config(self),
            "quantization_config": get_quantization_config(self),
        }

    def load_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained``."""
        chosen = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        return {name: value for name, value in chosen.items() if value is not None}


def write_merged(trainer: Any) -> Path:
    """Write the model with its adapters merged; the trainer cannot be used afterwards."""
    folder = Path(trainer.args.output_dir) / MERGED_FOLDER
    model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    flush(folder)
    return folder


@contextlib.contextmanager
def refused_settings() -> Iterator[None]:
    """Raise errors of libraries that reject a setting as `ConfigurationError`."""
    try:
        yield
    except AgentEnvsError:
        raise
    except (ValueError, ImportError, OSError) as error:
        raise ConfigurationError(" ".join(str(error).split())) from error


def fit_environment(
    tokenizer: Any,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    facts: EnvironmentFacts,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Return an environment's arguments with a tool format that the chat template can show.

    Raises:
        ConfigurationError: If the tokenizer does not know the words of the environment.
    """
    renderer, unknown = ChatRenderer(tokenizer), tokenizer.unk_token_id
    prompts = [renderer.prompt_ids(i["messages"], template_tools(i), None) for i in facts.states]
    ids = [token for prompt in prompts for token in prompt]
    share = 0.0 if unknown is None else ids.count(unknown) / max(1, len(ids))
    if share > MAX_UNKNOWN_SHARE:
        raise ConfigurationError(
            f"The model does not know the words of {env_id}: {share:.0%} of the tokens of its "
            "first states are unknown. Make a tiny policy for it with python -m "
            f"agent_trainers.tiny_policy --env {env_id}, or pass a language model with --model."
        )
    tools = template_tools(facts.states[0])
    if not tools or "tool_format" in env_kwargs or renderer.shows_tools(tools):
        return dict(env_kwargs)
    notify(
        "The model's chat template shows no tools, so the environment describes them: "
        "tool_format='tags'."
    )
    return {**env_kwargs, "tool_format": "tags"}
