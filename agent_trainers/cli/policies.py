"""Options of the model: trained with its adapters, or run as a policy, local or served."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg
from trl import ModelConfig, get_quantization_config

from agent_envs.core.command_line import json_object
from agent_envs.core.lookup import lookup
from agent_envs.errors import AgentEnvsError, ConfigurationError, RolloutError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.cli.arguments import check_range
from agent_trainers.cli.environments import (
    DEFAULT_ENV,
    Environment,
    inspect_environment,
)
from agent_trainers.policies import Policy
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import check_model, load_tokenizer
from agent_trainers.policies.served import OpenAIPolicy
from agent_trainers.recipes import find_turn_length
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trainers.config import fast_precision
from agent_trainers.trajectory import Trajectory, check_kind

EMBEDDED: Final = "embedded policy"
"""Name of the default model in results."""


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
        check_range(self, "at least 1", lambda value: value >= 1, "lora_r")
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


def model_path(options: Any) -> str:
    """Return the model of the options as transformers loads it."""
    return check_model(str(TINY_POLICY) if options.model is None else options.model)


@contextlib.contextmanager
def refused_settings() -> Iterator[None]:
    """Raise errors of libraries that reject a setting as `ConfigurationError`."""
    try:
        yield
    except AgentEnvsError:
        raise
    except (ValueError, ImportError, OSError) as error:
        raise ConfigurationError(" ".join(str(error).split())) from error


@dataclass
class PolicyArguments:
    """The policy and its environment."""

    model: str | None = HfArg(
        default=None,
        help="Name of a model on the hub, or a folder; default: the embedded policy. With "
        "base_url, the model's name on the server.",
    )
    dtype: str = HfArg(
        default="auto",
        help="Type of the weights; auto: as saved, or bfloat16 on a CPU with instructions for it.",
    )
    base_url: str | None = HfArg(
        default=None,
        help="OpenAI-compatible server, such as http://localhost:8000/v1, with the "
        "key in OPENAI_API_KEY.",
    )
    max_concurrency: int = HfArg(default=16, help="Concurrent requests, with base_url.")
    request_timeout: float = HfArg(default=300.0, help="Seconds per request, with base_url.")
    tool_format: str | None = HfArg(
        default=None, help="How the model calls tools; openai: by the server's own function calls."
    )
    env: str = HfArg(default=DEFAULT_ENV, help="Gymnasium id.")
    env_kwargs: str | None = HfArg(
        default=None,
        help="Its keyword arguments as JSON; default of the synthetic one: test split.",
    )
    greedy: bool = HfArg(default=False, help="Take the most likely token.")
    temperature: float = HfArg(default=1.0, help="Sampling temperature.")
    top_p: float = HfArg(default=1.0, help="Nucleus sampling.")
    top_k: int = HfArg(default=0, help="Sample from this many tokens; 0 for all.")
    max_completion_length: int | None = HfArg(
        default=None, help="Longest turn in tokens; by default that of training, if it is known."
    )
    batch_size: int = HfArg(default=64, help="Prompts per generation batch.")
    num_tasks: int = HfArg(default=200, help="Number of tasks, from the first.")
    seed: int = HfArg(default=0, help="Random seed.")

    def __post_init__(self) -> None:
        """Check ranges and contradictions."""
        check_range(self, "at least 1", lambda value: value >= 1, "batch_size", "max_concurrency",
                    "max_completion_length", "num_tasks", "samples_per_task")  # fmt: skip
        check_range(self, "at least 0", lambda value: value >= 0, "temperature", "top_k", "seed")
        check_range(self, "in (0, 1]", lambda value: 0 < value <= 1, "top_p")
        check_range(self, "positive", lambda value: value > 0, "request_timeout")
        if self.base_url is None:
            name = self.tool_format
            if name and lookup(TOOL_FORMATS, name, kind="tool format").is_structured:
                raise ConfigurationError(f"--tool_format {name} needs a served model: --base_url.")
        elif not self.base_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--base_url {self.base_url}: must begin with http://.")
        elif self.model is None:
            raise ConfigurationError("--base_url needs --model: the model's name on the server.")
        elif self.top_k:
            raise ConfigurationError("--top_k is not a parameter of OpenAI's API; use --top_p.")


def check_output(option: str, path: str, *, is_trajectories: bool = False) -> None:
    """Raise if `path` cannot be written at the end, or has no known extension of trajectories."""
    if is_trajectories:
        check_kind(path)
    if Path(path).is_dir():
        raise ConfigurationError(f"{option} {path}: is a folder. Name a file.")
    check_writable(Path(path).parent, option)


def open_environment(
    options: PolicyArguments, notify: Callable[[str], None], **defaults: Any
) -> Environment:
    """Open the environment of the options, fitted to the policy, and set the turn length.

    `defaults` are the environment's arguments unless others are given.
    """
    env_kwargs = defaults | json_object(options.env_kwargs, "--env_kwargs")
    if options.tool_format:
        env_kwargs["tool_format"] = options.tool_format
    take_turn_length(options, notify)
    tokenizer = None if options.base_url else load_tokenizer(model_path(options))
    return inspect_environment(options.env, env_kwargs, tokenizer, notify)


def take_turn_length(options: PolicyArguments, notify: Callable[[str], None]) -> None:
    """Set the turn length of a local model to that of its training, unless given."""
    if options.max_completion_length is not None or options.base_url is not None:
        return
    if (trained_for := find_turn_length(model_path(options))) is not None:
        options.max_completion_length, source = trained_for
        notify(f"Turns have at most {trained_for[0]} tokens, as in training ({source}).")


@contextlib.contextmanager
def open_policy(
    options: PolicyArguments, environment: Environment | None = None
) -> Iterator[Policy]:
    """Load the model or connect to its server, for the duration of the block.

    Without an environment (programs), tools are called in the default format.
    """
    sampling: dict[str, Any] = {
        "temperature": 0.0 if options.greedy else options.temperature,
        "top_p": options.top_p,
    }
    if options.base_url is None:
        # the embedded policy always runs in the type it was saved in
        is_free = options.dtype == "auto" and options.model is not None
        yield load_policy(
            model_path(options),
            dtype="bfloat16" if is_free and fast_precision() else options.dtype,
            max_new_tokens=options.max_completion_length,
            **sampling,
            top_k=options.top_k,
            max_batch_size=options.batch_size,
        )
        return
    state = {} if environment is None else environment.states[0]
    policy = OpenAIPolicy(
        base_url=options.base_url,
        model=str(options.model),
        tool_format=state.get("tool_format") or options.tool_format or "hermes",
        max_new_tokens=options.max_completion_length or 512,
        **sampling,
        max_concurrency=options.max_concurrency,
        timeout_seconds=options.request_timeout,
    )
    with contextlib.closing(policy):
        yield policy


def check_episodes(trajectories: Sequence[Trajectory]) -> None:
    """Raise `RolloutError` with the first error if most episodes could not be scored."""
    failed = [t for t in trajectories if not t.is_scorable]
    if 2 * len(failed) > len(trajectories):
        error = next((t.error for t in failed if t.error), None) or "no error was recorded"
        raise RolloutError(
            f"{len(failed)} of {len(trajectories)} episodes failed because of errors outside the "
            f"model. The first error: {error.strip().splitlines()[-1]}"
        )
