"""Agents on a model, local or served.

`base_tool_call` lets the model call the tools without training for the task; `react` does so in
ReAct's format (Yao et al., arXiv 2210.03629), `checkpoint` with a trained model. `naive_rag` and
`iterative_rag` search by a plan. `reflexion` and `best_of_n` attempt a task several times.
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
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import (
    Agent,
    MakeEnv,
    PlayedEpisode,
    collect,
    tool_env,
    total_usage,
)
from agent_leaderboard.agents.repeated_attempts import Collect, best_of, with_reflection
from agent_leaderboard.agents.strategies import SearchStrategy
from agent_leaderboard.records.reading import first_problem
from agent_trainers.policies import Policy
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec

Strategy = Callable[[Policy, ToolFormat], Policy]
RunAttempts = Callable[[Policy, Collect, Sequence[EpisodeSpec]], list[PlayedEpisode]]
DEFAULT_MAX_NEW_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of every model agent."""

    model: str
    """Name or folder; with `base_url` the name on the server."""
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
    """Number of attempts at a task."""


Settings = TypeVar("Settings", bound=ModelSettings)


def read_settings(kind: type[Settings], settings: Mapping[str, Any], agent: str) -> Settings:
    """Validate the settings of an agent."""
    known = {entry.name: entry for entry in dataclasses.fields(kind)}
    for name in settings:
        lookup(known, name, kind=f"setting of {agent}")
    try:
        read = pydantic.TypeAdapter(kind).validate_python(dict(settings))
    except pydantic.ValidationError as error:
        name, message = first_problem(error)
        raise ConfigurationError(f"Setting {name!r} of {agent}: {message}.") from None
    return read


@contextlib.contextmanager
def open_policy(settings: ModelSettings, tool_format: ToolFormat) -> Iterator[Policy]:
    """Yield a policy for environments with this tool format."""
    if settings.base_url is None:
        names = ("model", "dtype", "concurrency", "chat_template_kwargs", "temperature", "top_p",
                 "max_new_tokens")  # fmt: skip
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
    from transformers.utils.logging import disable_progress_bar

    from agent_trainers.policies.local import load_policy

    disable_progress_bar()  # of loading
    batch = options.pop("concurrency")
    return load_policy(options.pop("model"), max_batch_size=batch, **options)


def _run_once(model: Policy, run: Collect, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
    return [PlayedEpisode(trajectory=t, usage=total_usage([t])) for t in run(model, specs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAgent:
    """Runs episodes with the model's policy, or one that a strategy makes of it."""

    kind: str
    """For messages."""
    settings: ModelSettings
    strategy: Strategy | None = None
    """Makes a policy of the model's; needs a search tool."""
    min_turns: int = 1
    """Turns that a question takes at least."""
    run_attempts: RunAttempts = _run_once
    """Attempts each task, once or several times."""

    def check(self, make_env: MakeEnv) -> None:
        """Check that the agent can act in an environment, without loading the model."""
        self._checked_format(make_env)

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        tool_format = self._checked_format(make_env)
        with open_policy(self.settings, tool_format) as model:
            return self.run_attempts(
                model,
                lambda policy, own: collect(
                    make_env, self.strategy(policy, tool_format) if self.strategy else policy, own
                ),
                specs,
            )

    def _checked_format(self, make_env: MakeEnv) -> ToolFormat:
        """Return the tool format of an environment in which the agent can act."""
        with contextlib.closing(make_env()) as env:
            tool_format = tool_env(env).action_format
            if self.strategy is not None:
                self._check_search(env)
        if self.settings.base_url is None and tool_format.is_structured:
            raise ConfigurationError(
                f"{self.settings.model}: tool_format {tool_format.name} is for served models; pass "
                "base_url, or use hermes, which chat templates of local models describe."
            )
        return tool_format

    def _check_search(self, env: TextEnv) -> None:
        tools = tool_env(env).tools
        name, limit = (env.spec.id, env.spec.max_episode_steps) if env.spec else ("It", None)
        search = tools.get("search")
        if search is None or set(search.parameters.get("properties", {})) != {"query"}:
            raise ConfigurationError(
                f"Agent {self.kind!r} needs a tool search(query), which {name} lacks (its tools: "
                f"{', '.join(tools) or 'none'}). Leave the agent out of the runs on it."
            )
        if limit is not None and limit < self.min_turns:
            raise ConfigurationError(
                f"Agent {self.kind!r} takes {self.min_turns} turns for a question, and "
                f"{name} ends after {limit}. Lower its settings, or raise max_episode_steps."
            )


def make_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build a model agent."""
    if kind == "naive_rag":  # one search with the question, then the answer
        read = read_settings(ModelSettings, settings, kind)
        return ModelAgent(kind=kind, settings=read, strategy=SearchStrategy, min_turns=2)
    if kind == "iterative_rag":
        own = read_settings(IterativeSettings, settings, kind)
        strategy = functools.partial(SearchStrategy, iterations=own.iterations)
        turns = own.iterations + 1
        return ModelAgent(kind=kind, settings=own, strategy=strategy, min_turns=turns)
    if kind == "reflexion":
        trying = read_settings(ReflexionSettings, settings, kind)
        again = functools.partial(with_reflection, trials=trying.trials)
        return ModelAgent(kind=kind, settings=trying, run_attempts=again)
    if kind == "best_of_n":
        sampling = read_settings(BestOfSettings, settings, kind)
        if sampling.temperature == 0 and sampling.samples > 1:
            raise ConfigurationError(
                "best_of_n at temperature 0 repeats the same episode. Raise temperature, or use "
                "base_tool_call."
            )
        several = functools.partial(best_of, samples=sampling.samples)
        return ModelAgent(kind=kind, settings=sampling, run_attempts=several)
    read = read_settings(ModelSettings, settings, kind)
    is_missing = read.base_url is None and not (Path(read.model) / "config.json").is_file()
    if kind == "checkpoint" and is_missing:
        raise ConfigurationError(
            f"checkpoint: there is no model in {read.model}. Pass the folder of a trained model "
            "(--output_dir of agent-r1-train), or base_url where it is served."
        )
    return ModelAgent(kind=kind, settings=read)
