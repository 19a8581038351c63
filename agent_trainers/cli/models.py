"""Which model the launchers train, how much of it, and whether it can read the environment.

Nothing here imports torch before a model is loaded: options are parsed without it.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg
from trl import ModelConfig

from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.checkpointing.checkpoints import flush
from agent_trainers.cli.arguments import check_range
from agent_trainers.cli.environments import FirstLook
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.episode import template_tools

EMBEDDED: Final = "embedded policy"
"""What the model is called where none was given."""
FORMAT_IN_WORDS: Final = "tags"
"""The tool format for templates that show no tools: the environment describes them itself."""
MAX_UNKNOWN_SHARE: Final = 0.1
MERGED_FOLDER: Final = "merged"


@dataclass
class ModelArguments(ModelConfig):  # type: ignore[misc] # TRL is untyped
    """Which model, and how much of it is trained: TRL's options, with ``model`` for its name."""

    model: str | None = HfArg(
        default=None,
        help="A causal language model: its name on the hub, a folder, or a GGUF file. The embedded "
        "policy if not given.",
    )
    dtype: str | None = HfArg(
        default="float32",
        help="Type of the model's weights: float32, bfloat16, float16, or auto for that they are "
        "saved in. What is computed in is --bf16 and --fp16.",
    )
    lora_r: int | None = HfArg(
        default=None,
        help="Rank of LoRA adapters, which are then trained instead of the whole model; 16 with "
        "--use_peft alone.",
    )
    merge_adapter: bool = HfArg(
        default=False,
        help=f"Write the model with its adapters merged to {MERGED_FOLDER}/ in output_dir, too.",
    )
    model_name_or_path: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Let ``lora_r`` say enough.

        Raises:
            ConfigurationError: If something does nothing, or its library is missing.
        """
        check_range(self, "at least 1", lambda value: value >= 1, "lora_r")
        if self.lora_r is not None:
            self.use_peft = True
        elif self.use_peft:
            self.lora_r = 16
        super().__post_init__()
        target = getattr(self, "lora_target_modules", None)
        if isinstance(target, str) and target != "all-linear" and target.isidentifier():
            self.lora_target_modules = [target]  # TRL takes a single name for a pattern
        given = {f.name: getattr(self, f.name) != f.default for f in dataclasses.fields(self)}
        for name in (*(n for n in given if n.startswith("lora_")), "use_dora", "use_rslora",
                     "load_in_4bit", "load_in_8bit", "merge_adapter"):  # fmt: skip
            if given[name] and not self.use_peft:
                raise ConfigurationError(f"--{name} does nothing without --lora_r: set it, too.")
        is_quantised = self.load_in_4bit or self.load_in_8bit
        if is_quantised and importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigurationError(
                "--load_in_4bit and --load_in_8bit need bitsandbytes: pip install bitsandbytes"
            )

    def trainer_arguments(self) -> dict[str, Any]:
        """Return what the trainers take of it."""
        from trl import get_peft_config, get_quantization_config

        return {
            "peft_config": get_peft_config(self),
            "quantization_config": get_quantization_config(self),
        }

    def load_arguments(self) -> dict[str, Any]:
        """Return what ``from_pretrained`` takes of it."""
        chosen = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        return {name: value for name, value in chosen.items() if value is not None}


def write_merged(trainer: Any) -> Path:
    """Write a trained model with its adapters merged into it, beside the adapters.

    Merging changes the weights: the trainer is of no use afterwards.
    """
    folder = Path(trainer.args.output_dir) / MERGED_FOLDER
    model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    flush(folder)
    return folder


@contextlib.contextmanager
def refused_settings() -> Iterator[None]:
    """Take what libraries complain of while the block sets a trainer up for a wrong setting.

    Raises:
        ConfigurationError: In their words.
    """
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
    look: FirstLook,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return an environment's arguments, with the tool format that fits a model's chat template.

    Args:
        tokenizer: The model's.
        env_id: The environment.
        env_kwargs: What was given.
        look: What it shows with them.
        say: Is told in one line what was chosen.

    Raises:
        ConfigurationError: If the tokenizer does not know the words of the environment.
    """
    renderer = ChatRenderer(tokenizer)
    _check_words(renderer, env_id, look.states)
    tools = template_tools(look.states[0])
    if not tools or "tool_format" in env_kwargs or renderer.shows_tools(tools):
        return dict(env_kwargs)
    say(
        "The model's chat template shows no tools, so the environment describes them: "
        f"tool_format={FORMAT_IN_WORDS!r}."
    )
    return {**env_kwargs, "tool_format": FORMAT_IN_WORDS}


def _check_words(renderer: ChatRenderer, env_id: str, states: list[dict[str, Any]]) -> None:
    unknown = renderer.tokenizer.unk_token_id
    if unknown is None:
        return
    ids = [
        token
        for info in states
        for token in renderer.prompt_ids(info["messages"], template_tools(info), None)
    ]
    if (share := ids.count(unknown) / max(1, len(ids))) > MAX_UNKNOWN_SHARE:
        raise ConfigurationError(
            f"The model does not know the words of {env_id}: {share:.0%} of the tokens of its "
            "first states are unknown, so there would be nothing to learn. Make a tiny policy for "
            f"it with python -m agent_trainers.make_tiny_policy --env {env_id}, or pass a "
            "language model with --model."
        )
