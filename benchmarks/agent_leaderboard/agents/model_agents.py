"""Agents on a model, local or served.

`base_tool_call` lets the model call the tools without training for the task; `react` does so in
ReAct's format (Yao et al., arXiv 2210.03629), `checkpoint` with a trained model. `naive_rag` and
`iterative_rag` search by a plan. `reflexion` and `best_of_n` attempt a task several times.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

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
from agent_leaderboard.agents.strategies import SearchStrategy, best_of, with_reflection
from agent_leaderboard.records.reading import first_problem
from agent_trainers.policies import Policy
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

DEFAULT_MAX_NEW_TOKENS: Final = 512
_PROMPT_PARAMETERS: Final = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
))  # fmt: skip
"""Parameters of ``apply_chat_template``: another template could contain a table of answers."""


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options.keys() & _PROMPT_PARAMETERS:
        raise ValueError(f"{name!r} is not an option of a template")
    return options


_Word = Annotated[str, pydantic.Field(max_length=32)]


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
    chat_template_kwargs: Annotated[
        dict[_Word, bool | int | _Word], pydantic.AfterValidator(_check_options)
    ] = field(default_factory=dict)
    """Options of a local model's template: ``{"enable_thinking": false}``."""
    tool_format: str | None = None
    """Tool format of the environment; see `agent_leaderboard.agents.agent.AgentKind`."""
    iterations: pydantic.PositiveInt = 3
    """Number of searches and answers, of `iterative_rag`."""
    trials: pydantic.PositiveInt = 3
    """Largest number of attempts at a task, of `reflexion`."""
    samples: pydantic.PositiveInt = 5
    """Number of attempts at a task, of `best_of_n`."""


_OWN: Final = {"iterations": "iterative_rag", "trials": "reflexion", "samples": "best_of_n"}
"""Kind of agent that each setting belongs to; the other settings are for all."""


def read_settings(settings: Mapping[str, Any], agent: str) -> ModelSettings:
    """Validate the settings of an agent."""
    names = [entry.name for entry in dataclasses.fields(ModelSettings)]
    known = {name: None for name in names if _OWN.get(name, agent) == agent}
    for name in settings:
        lookup(known, name, kind=f"setting of {agent}")
    try:
        return pydantic.TypeAdapter(ModelSettings).validate_python(dict(settings))
    except pydantic.ValidationError as error:
        name, message = first_problem(error)
        raise ConfigurationError(f"Setting {name!r} of {agent}: {message}.") from None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAgent:
    """Runs episodes with the model's policy, once or several times, or with a search strategy."""

    kind: str
    settings: ModelSettings

    @property
    def num_searches(self) -> int:
        """Searches of the strategy, before it answers; 0 if the model calls the tools."""
        return {"naive_rag": 1, "iterative_rag": self.settings.iterations}.get(self.kind, 0)

    def check(self, make_env: MakeEnv) -> None:
        """Check that the agent can act in an environment, without loading the model."""
        self._checked_format(make_env)

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        settings, tool_format = self.settings, self._checked_format(make_env)

        def run(policy: Policy, own: Sequence[EpisodeSpec]) -> list[Trajectory]:
            if self.num_searches:
                iterations = settings.iterations if self.kind == "iterative_rag" else None
                policy = SearchStrategy(policy, tool_format, iterations=iterations)
            return collect(make_env, policy, own)

        with open_policy(settings, tool_format) as model:
            if self.kind == "reflexion":
                return with_reflection(model, run, specs, trials=settings.trials)
            if self.kind == "best_of_n":
                return best_of(model, run, specs, samples=settings.samples)
            return [PlayedEpisode(trajectory=t, usage=total_usage([t])) for t in run(model, specs)]

    def _checked_format(self, make_env: MakeEnv) -> ToolFormat:
        """Return the tool format of an environment in which the agent can act."""
        with contextlib.closing(make_env()) as env:
            tool_format, tools = tool_env(env).action_format, tool_env(env).tools
            spec = env.spec
        name, limit = (spec.id, spec.max_episode_steps) if spec else ("It", None)
        search, turns = tools.get("search"), self.num_searches + 1
        if self.num_searches and (
            search is None or set(search.parameters.get("properties", {})) != {"query"}
        ):
            raise ConfigurationError(
                f"Agent {self.kind!r} needs a tool search(query), which {name} lacks (its tools: "
                f"{', '.join(tools) or 'none'}). Leave the agent out of the runs on it."
            )
        if limit is not None and limit < turns:
            raise ConfigurationError(
                f"Agent {self.kind!r} takes {turns} turns for a question, and {name} ends after "
                f"{limit}. Lower its settings, or raise max_episode_steps."
            )
        if self.settings.base_url is None and tool_format.is_structured:
            raise ConfigurationError(
                f"{self.settings.model}: tool_format {tool_format.name} is for served models; pass "
                "base_url, or use hermes, which chat templates of local models describe."
            )
        return tool_format


def make_agent(kind: str, settings: Mapping[str, Any]) -> Agent:
    """Build a model agent."""
    read = read_settings(settings, kind)
    if kind == "best_of_n" and read.temperature == 0 and read.samples > 1:
        raise ConfigurationError(
            "best_of_n at temperature 0 repeats the same episode. Raise temperature, or use "
            "base_tool_call."
        )
    is_missing = read.base_url is None and not (Path(read.model) / "config.json").is_file()
    if kind == "checkpoint" and is_missing:
        raise ConfigurationError(
            f"checkpoint: there is no model in {read.model}. Pass the folder of a trained model "
            "(--output_dir of agent-r1-train), or base_url where it is served."
        )
    return ModelAgent(kind=kind, settings=read)
