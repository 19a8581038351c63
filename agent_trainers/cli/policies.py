"""Who plays, for the launchers that only play: a local model or a served one, and in what."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import json_object
from agent_trainers.cli.environments import environment_maker
from agent_trainers.cli.models import fit_environment
from agent_trainers.policies import Policy
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.tiny_policy import TINY_POLICY


@dataclass
class PolicyArguments:
    """Who plays, and in what."""

    model: str | None = HfArg(
        default=None,
        help="A causal language model: its name on the hub, a folder, or a GGUF file; the embedded "
        "policy if not given. With base_url, the name under which the server knows the model.",
    )
    dtype: str = HfArg(
        default="auto", help="Type of the model's weights; auto: that they are saved in."
    )
    base_url: str | None = HfArg(
        default=None, help="Ask an OpenAI-compatible server, such as http://localhost:8000/v1."
    )
    api_key_env: str | None = HfArg(
        default=None,
        help="Environment variable with the server's key; OPENAI_API_KEY if not given.",
    )
    max_concurrency: int = HfArg(default=16, help="Requests under way at once, with base_url.")
    request_timeout: float = HfArg(default=300.0, help="Seconds a request may take, with base_url.")
    tool_format: str | None = HfArg(
        default=None,
        help="How the model calls tools; openai: by the server's own function calls. The "
        "environment's own if not given.",
    )
    env: str = HfArg(default="AgentR1/SyntheticMultiHop-v0", help="Gymnasium id to play.")
    env_kwargs: str | None = HfArg(
        default=None,
        help="Keyword arguments of the environment as JSON. The synthetic one plays "
        'held-out worlds unless they say otherwise: \'{"split": "test"}\'.',
    )
    greedy: bool = HfArg(default=False, help="Take the most likely token.")
    temperature: float = HfArg(default=1.0, help="Sampling temperature.")
    top_p: float = HfArg(default=1.0, help="Nucleus sampling.")
    top_k: int = HfArg(default=0, help="Sample from this many tokens; 0 for all.")
    max_completion_length: int | None = HfArg(
        default=None, help="Longest turn in tokens; 24 for the embedded policy, else 512."
    )
    batch_size: int = HfArg(default=64, help="Prompts sampled from at once.")


def check_policy(options: PolicyArguments) -> None:
    """Refuse options that contradict each other.

    Raises:
        ConfigurationError: Names them.
    """
    for name in ("batch_size", "max_concurrency"):
        if (value := getattr(options, name)) < 1:
            raise ConfigurationError(f"--{name} must be at least 1, not {value}.")
    if options.temperature < 0:
        raise ConfigurationError(f"--temperature must not be negative: {options.temperature}.")
    _check_source(options)


def fitting_environment(
    options: PolicyArguments, say: Callable[[str], None], **defaults: Any
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the environment's arguments, so that the model can read it, and what makes it.

    `defaults` are arguments that hold where no others are given.
    """
    env_kwargs = dict(defaults) | json_object(options.env_kwargs, "--env_kwargs")
    if options.tool_format:
        env_kwargs["tool_format"] = options.tool_format
    if options.base_url is None:
        tokenizer = load_tokenizer(find_model(options.model or str(TINY_POLICY)))
        env_kwargs = fit_environment(tokenizer, options.env, env_kwargs, say)
    return env_kwargs, environment_maker(options.env, env_kwargs)


@contextlib.contextmanager
def open_policy(
    options: PolicyArguments, make_env: Callable[[], Any] | None = None
) -> Iterator[Policy]:
    """Load the model or connect to its server; close it when the block ends.

    Without an environment, tools are called in the default format.
    """
    temperature = 0.0 if options.greedy else options.temperature
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": options.top_p}
    if options.base_url is None or options.model is None:
        yield load_policy(
            options.model or str(TINY_POLICY),
            dtype=options.dtype,
            max_new_tokens=options.max_completion_length,
            **sampling,
            top_k=options.top_k,
            max_batch_size=options.batch_size,
        )
        return
    from agent_trainers.policies.served import OpenAIPolicy

    tool_format = options.tool_format or "hermes"
    if make_env is not None:
        env = make_env()
        _, info = env.reset(seed=0)
        env.close()
        tool_format = info.get("tool_format", "hermes")
    policy = OpenAIPolicy(
        base_url=options.base_url,
        model=options.model,
        tool_format=tool_format,
        api_key_env=options.api_key_env,
        max_new_tokens=options.max_completion_length or 512,
        **sampling,
        max_concurrency=options.max_concurrency,
        timeout_seconds=options.request_timeout,
    )
    with contextlib.closing(policy):
        yield policy


def _check_source(options: PolicyArguments) -> None:
    if options.base_url is None:
        if options.api_key_env is not None:
            raise ConfigurationError("--api_key_env goes with --base_url.")
        name = options.tool_format
        if name and lookup(TOOL_FORMATS, name, kind="tool format").is_structured:
            raise ConfigurationError(
                f"--tool_format {name} is for served models: pass --base_url, or leave it out and "
                "the chat template of the local model describes the tools."
            )
        return
    if options.model is None:
        raise ConfigurationError("--base_url needs --model: the name the server knows it by.")
    if options.top_k:
        raise ConfigurationError("--top_k is no parameter of OpenAI's API; use --top_p.")
