"""Agents on a model: local, in vLLM, or served.

`base_tool_call` lets the model call the tools without training for the task; `react` does so in
ReAct's format, `checkpoint` with a trained model. `naive_rag`, `self_ask` and `iterative_rag`
search by a plan. `reflexion` and `best_of_n` attempt a task several times.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic

from agent_envs.core.lookup import lookup
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import Agent, PlayedEpisode, tool_env
from agent_leaderboard.agents.repeated_attempts import (
    Collect,
    best_of,
    total_usage,
    with_reflection,
)
from agent_leaderboard.agents.strategies import IterativeRAG, NaiveRAG, SelfAsk
from agent_leaderboard.records.reading import first_problem
from agent_trainers.policies import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]
Strategy = Callable[[Policy, ToolFormat], Policy]
RunAttempts = Callable[[Policy, Collect, Sequence[EpisodeSpec]], list[PlayedEpisode]]
DEFAULT_MAX_NEW_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of every model agent."""

    model: str
    """Name or folder; with `base_url` the name on the server."""
    backend: Literal["transformers", "vllm"] = "transformers"
    """Engine of a local model."""
    base_url: str | None = None
    """OpenAI-compatible server."""
    api_key_env: str | None = None
    """Environment variable with the server's key; ``OPENAI_API_KEY`` by default."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weight type of a local model; ``auto`` for the saved one."""
    temperature: pydantic.NonNegativeFloat = 1.0
    """0 takes the most likely token."""
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    max_new_tokens: int | None = None
    """Longest turn; 24 for the embedded policy, 512 otherwise."""
    concurrency: pydantic.PositiveInt = 64
    """Concurrent turns."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of a local model's template: ``{"enable_thinking": false}``."""
    tool_format: str | None = None
    """Tool format of the environment; see `agent_leaderboard.agents.agent.AgentKind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativeSettings(ModelSettings):
    """Settings of `iterative_rag`."""

    iterations: pydantic.PositiveInt = 3
    """Number of searches and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflexionSettings(ModelSettings):
    """Settings of `reflexion`."""

    trials: pydantic.PositiveInt = 3
    """Largest number of attempts at a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfSettings(ModelSettings):
    """Settings of `best_of_n`."""

    samples: pydantic.PositiveInt = 5
    """Attempts at a task."""


Settings = TypeVar("Settings", bound=ModelSettings)


def read_settings(kind: type[Settings], settings: Mapping[str, Any], agent: str) -> Settings:
    """Validate the settings of an agent.

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


@contextlib.contextmanager
def open_policy(settings: ModelSettings, tool_format: ToolFormat) -> Iterator[Policy]:
    """Yield a policy for environments with this tool format."""
    if settings.base_url is None:
        names = ("model", "backend", "dtype", "concurrency", "chat_template_kwargs",
                 "temperature", "top_p", "max_new_tokens")  # fmt: skip
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


@functools.lru_cache(maxsize=1)  # one model at a time
def _local_policy(settings: str) -> Policy:
    """Load a model by its settings, as JSON; agents with the same model share it."""
    options: dict[str, Any] = json.loads(settings)
    model, backend = options.pop("model"), options.pop("backend")
    if backend == "vllm":
        from agent_trainers.policies.local import vllm_policy
        from agent_trainers.recipes import find_turn_length

        trained_for = find_turn_length(model)
        usual = DEFAULT_MAX_NEW_TOKENS if trained_for is None else trained_for.tokens
        options["max_new_tokens"] = options["max_new_tokens"] or usual
        del options["concurrency"]  # the engine chooses its batches
        if options.pop("dtype") != "auto":
            raise ConfigurationError(f"{model}: vllm uses the saved dtype; leave dtype out.")
        return vllm_policy(model, **options)
    from transformers.utils.logging import disable_progress_bar

    from agent_trainers.policies.local import load_policy

    disable_progress_bar()  # of loading
    return load_policy(model, max_batch_size=options.pop("concurrency"), **options)


class ModelAgent:
    """Runs episodes with the model's policy, or one that a strategy makes of it."""

    def __init__(
        self,
        kind: str,
        settings: ModelSettings,
        *,
        strategy: Strategy | None = None,
        min_turns: int = 1,
        run_attempts: RunAttempts | None = None,
    ) -> None:
        """Make an agent.

        Args:
            kind: Its kind, for messages.
            settings: The model and its sampling.
            strategy: Makes a policy of the model's; needs a search tool. None lets the model act.
            min_turns: Turns that a question takes at least.
            run_attempts: Attempts each task several times; None attempts it once.
        """
        self._kind = kind
        self._settings = settings
        self._strategy = strategy
        self._min_turns = min_turns
        self._run_attempts = run_attempts or _run_once

    def check(self, make_env: MakeEnv) -> None:
        """Check that the agent can act in an environment, without loading the model."""
        self._checked_format(make_env)

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        tool_format = self._checked_format(make_env)
        with open_policy(self._settings, tool_format) as model:

            def collect(policy: Policy, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
                acting = self._strategy(policy, tool_format) if self._strategy else policy
                with contextlib.closing(Rollout(make_env, acting)) as rollout:
                    return rollout.collect(specs)

            return self._run_attempts(model, collect, specs)

    def _checked_format(self, make_env: MakeEnv) -> ToolFormat:
        """Return the tool format of an environment in which the agent can act."""
        with contextlib.closing(make_env()) as env:
            base = tool_env(env)
            if self._strategy is not None:
                name = env.spec.id if env.spec is not None else type(base).__name__
                limit = env.spec.max_episode_steps if env.spec is not None else None
                self._check_search(base, name, limit)
        if self._settings.base_url is None and base.action_format.is_structured:
            raise ConfigurationError(
                f"{self._settings.model}: tool_format {base.action_format.name} is for served "
                "models; pass base_url, or use hermes, which chat templates of local models "
                "describe."
            )
        return base.action_format

    def _check_search(self, env: ToolEnv, name: str, max_turns: int | None) -> None:
        search = env.tools.get("search")
        if search is None or set(search.parameters.get("properties", {})) != {"query"}:
            tools = ", ".join(env.tools) or "none"
            raise ConfigurationError(
                f"Agent {self._kind!r} needs a tool search(query), which {name} lacks (its tools: "
                f"{tools}). Leave the agent out of the runs on this environment."
            )
        if max_turns is not None and max_turns < self._min_turns:
            raise ConfigurationError(
                f"Agent {self._kind!r} takes {self._min_turns} turns for a question, and "
                f"{name} ends after {max_turns}. Lower its settings, or raise max_episode_steps."
            )


def _run_once(model: Policy, collect: Collect, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
    return [
        PlayedEpisode(trajectory=trajectory, usage=total_usage([trajectory]))
        for trajectory in collect(model, specs)
    ]


def _builder(kind: str, **options: Any) -> Callable[[Mapping[str, Any]], Agent]:
    """Return the builder of an agent that takes only `ModelSettings`."""

    def build(settings: Mapping[str, Any]) -> Agent:
        return ModelAgent(kind, read_settings(ModelSettings, settings, kind), **options)

    return build


base_tool_call = _builder("base_tool_call")
"""The model calls the tools itself."""
react = _builder("react")
"""ReAct (Yao et al., arXiv 2210.03629), by the environment's tool format ``react``."""
naive_rag = _builder("naive_rag", strategy=NaiveRAG, min_turns=2)
"""One search with the question, then the answer."""
self_ask = _builder("self_ask", strategy=SelfAsk, min_turns=2)
"""Searches for follow-up questions that the model asks itself."""


def checkpoint(settings: Mapping[str, Any]) -> Agent:
    """Build an agent on a trained model: a folder that ``agent-r1-train`` wrote."""
    read = read_settings(ModelSettings, settings, "checkpoint")
    if read.base_url is None and not (Path(read.model) / "config.json").is_file():
        raise ConfigurationError(
            f"checkpoint: there is no model in {read.model}. Pass the folder of a trained model "
            "(--output_dir of agent-r1-train), or base_url where it is served."
        )
    return ModelAgent("checkpoint", read)


def iterative_rag(settings: Mapping[str, Any]) -> Agent:
    """Build an agent that alternates searches and answers."""
    read = read_settings(IterativeSettings, settings, "iterative_rag")
    strategy = functools.partial(IterativeRAG, iterations=read.iterations)
    return ModelAgent("iterative_rag", read, strategy=strategy, min_turns=read.iterations + 1)


def reflexion(settings: Mapping[str, Any]) -> Agent:
    """Build an agent that retries with its reflections on failures."""
    read = read_settings(ReflexionSettings, settings, "reflexion")
    attempts = functools.partial(with_reflection, trials=read.trials)
    return ModelAgent("reflexion", read, run_attempts=attempts)


def best_of_n(settings: Mapping[str, Any]) -> Agent:
    """Build an agent that takes the most frequent answer of several attempts."""
    read = read_settings(BestOfSettings, settings, "best_of_n")
    if read.temperature == 0 and read.samples > 1:
        raise ConfigurationError(
            "best_of_n at temperature 0 repeats the same episode. Raise temperature, or use "
            "base_tool_call."
        )
    attempts = functools.partial(best_of, samples=read.samples)
    return ModelAgent("best_of_n", read, run_attempts=attempts)
