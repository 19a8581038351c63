"""Where an agent's model comes from: a local model, vLLM, or an OpenAI-compatible server."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.records.reading import first_problem
from agent_trainers.policies import Policy

DEFAULT_MAX_NEW_TOKENS: Final = 512
_SAMPLING: Final = ("temperature", "top_p", "max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What every agent on a model takes."""

    model: str
    """Name or folder; with `base_url` the name by which the server knows it."""
    backend: Literal["transformers", "vllm"] = "transformers"
    """What runs a local model."""
    base_url: str | None = None
    """An OpenAI-compatible server to ask instead."""
    api_key_env: str | None = None
    """Environment variable with the server's key; ``OPENAI_API_KEY`` if not given."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of a local model's weights; ``auto`` for the saved one."""
    temperature: pydantic.NonNegativeFloat = 1.0
    """0 takes the most likely token."""
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    max_new_tokens: int | None = None
    """Longest turn; 24 for the embedded policy, else 512."""
    concurrency: pydantic.PositiveInt = 64
    """Turns under way at once."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed on to a local model's template: ``{"enable_thinking": false}``."""
    tool_format: str | None = None
    """Of the environment, which has it already: see `agent_leaderboard.agents.agent.AgentKind`."""


Settings = TypeVar("Settings", bound=ModelSettings)


def read_settings(kind: type[Settings], settings: Mapping[str, Any], agent: str) -> Settings:
    """Return the settings of an `agent`, which messages name, checked.

    Raises:
        UnknownNameError: If a setting is unknown; suggests the nearest.
        ConfigurationError: If a value is wrong, or the model is missing.
    """
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    for name in settings:
        lookup(known, name, kind=f"setting of {agent}")
    try:
        return pydantic.TypeAdapter(kind).validate_python(dict(settings))
    except pydantic.ValidationError as error:
        name, message = first_problem(error)
        raise ConfigurationError(f"Setting {name!r} of {agent}: {message}.") from None


def check_format(settings: ModelSettings, tool_format: ToolFormat) -> None:
    """See that the model can act in a tool format.

    Raises:
        ConfigurationError: If a local model is to use a server's calls.
    """
    if settings.base_url is None and tool_format.is_structured:
        raise ConfigurationError(
            f"{settings.model}: tool_format {tool_format.name} is for served models; pass "
            "base_url, or hermes, which a local model's chat template describes."
        )


@contextlib.contextmanager
def open_policy(settings: ModelSettings, tool_format: ToolFormat) -> Iterator[Policy]:
    """Give a policy for environments with this tool format; see `check_format`."""
    if settings.base_url is None:
        names = [*_SAMPLING, "model", "backend", "dtype", "concurrency", "chat_template_kwargs"]
        yield _local_policy(json.dumps({name: getattr(settings, name) for name in names}))
        return
    from agent_trainers.policies.served import OpenAIPolicy

    policy = OpenAIPolicy(
        base_url=settings.base_url,
        model=settings.model,
        tool_format=tool_format,
        api_key_env=settings.api_key_env,
        max_new_tokens=settings.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_concurrency=settings.concurrency,
    )
    with contextlib.closing(policy):
        yield policy


@functools.lru_cache(maxsize=1)  # a model at a time
def _local_policy(settings: str) -> Policy:
    """Load a model by its settings, as JSON; agents that differ in their kind only share it."""
    options: dict[str, Any] = json.loads(settings)
    model, backend = options.pop("model"), options.pop("backend")
    if backend == "vllm":
        from agent_trainers.policies.offline_engine import vllm_policy
        from agent_trainers.recipes import find_turn_length

        trained_for = find_turn_length(model)
        usual = DEFAULT_MAX_NEW_TOKENS if trained_for is None else trained_for.tokens
        options["max_new_tokens"] = options["max_new_tokens"] or usual
        del options["concurrency"]  # the engine batches as it sees fit
        if options.pop("dtype") != "auto":
            raise ConfigurationError(f"{model}: vllm takes the saved dtype; leave dtype out.")
        return vllm_policy(model, **options)
    from transformers.utils.logging import disable_progress_bar

    from agent_trainers.policies.local import load_policy

    disable_progress_bar()  # of loading; the run has a bar of its own
    return load_policy(model, max_batch_size=options.pop("concurrency"), **options)
