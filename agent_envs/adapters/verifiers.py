"""verifiers v1: our environments as a `Taskset` with the `Harness` for it; theirs as programs.

verifiers finds them by the name of a module at the top level, so make one, ``agent_r1.py``::

    from agent_envs.adapters.verifiers import GymnasiumHarness, GymnasiumTaskset

    __all__ = ["GymnasiumHarness", "GymnasiumTaskset"]

and name it: ``vf-eval agent_r1 --env.taskset.environment AgentR1/SyntheticMultiHop-v0
--env.agent.runtime.type subprocess``.

The harness runs in the process of verifiers and asks its endpoint for each turn, in the state that
the environment decides: a context that forgets is another branch of the trace. The reward of a
trace is the return, one named reward for each term; ``trace.info["turns"]`` says of each turn what
it earned. The turn limit stops a trace as ``max_turns``, which verifiers counts as truncated.

The other way round, an environment of verifiers is a program that asks a model:
`environment_program` makes one for ``agent-r1-train --program``, with its harness, tools, users and
rewards as they are.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import openai
import pydantic
import verifiers.v1 as vf

from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.formats.openai_format import FunctionCall

__all__ = ["GymnasiumHarness", "GymnasiumTaskset", "environment_program"]

_DONE: Final = vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GymnasiumTasksetConfig(vf.TasksetConfig):
    """Which environment, and which of its tasks."""

    environment: str = ""
    """Its Gymnasium id."""
    arguments: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Its other arguments, as for ``gymnasium.make``."""
    num_tasks: int | None = None
    """How many tasks: the first ones, all if None; of an endless family, drawn ones."""
    seed: int = 0
    """Seed of what is drawn."""


class EpisodeData(vf.TaskData):
    """An episode to play."""

    environment: str
    arguments: dict[str, Any]
    task: int
    seed: int


class EpisodeState(vf.State):
    """What the episode earned so far."""

    reward_terms: dict[str, float] = pydantic.Field(default_factory=dict)
    metrics: dict[str, float] = pydantic.Field(default_factory=dict)


class EpisodeTask(vf.Task[EpisodeData, EpisodeState]):
    """A task whose reward is the episode's return."""

    @vf.reward
    async def reward_terms(self, trace: Any) -> dict[str, float]:
        """Return the sum of each reward term."""
        terms: dict[str, float] = trace.state.reward_terms
        return terms

    @vf.metric
    async def metrics(self, trace: Any) -> dict[str, float]:
        """Return the episode's metrics."""
        metrics: dict[str, float] = trace.state.metrics
        return metrics


class GymnasiumTaskset(vf.Taskset[EpisodeTask, GymnasiumTasksetConfig]):
    """The tasks of an environment; without end where the environment has no end of them."""

    def __init__(self, config: GymnasiumTasksetConfig) -> None:
        """Make the environment once.

        Raises:
            ConfigurationError: If the config names none, or `num_tasks` is not to be had.
        """
        super().__init__(config)
        if not config.environment:
            raise ConfigurationError("Name an environment: --env.taskset.environment AgentR1/...")
        self._episode = OwnEpisode(config.environment, config.arguments)
        num_tasks: int | None = self._episode.env.unwrapped.num_tasks  # type: ignore[attr-defined]
        self.INFINITE = num_tasks is None and config.num_tasks is None

    def load(self) -> Iterator[EpisodeTask]:
        """Yield the tasks."""
        config = self.config
        for index, seed in self._drawn():
            question = self._episode.reset(seed=seed, task=index)
            data = EpisodeData(
                id=self._episode.info["task_id"],
                prompt=question,  # for those who look at it: the harness asks the environment
                environment=config.environment,
                arguments=config.arguments,
                task=index,
                seed=seed,
            )
            yield EpisodeTask(data, config.task)

    def _drawn(self) -> Iterator[tuple[int, int]]:
        config = self.config
        if not self.INFINITE:
            env = self._episode.env
            return draw_tasks(config.environment, env, config.num_tasks, config.seed)
        rng = np.random.default_rng(config.seed)
        return ((int(rng.integers(ENDLESS)), int(rng.integers(2**31))) for _ in itertools.count())


class GymnasiumHarness(vf.Harness[vf.HarnessConfig]):
    """Plays the episode of an `EpisodeTask`."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: Any,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: EpisodeData,
    ) -> vf.ProgramResult:
        """Play until the episode ends, or verifiers stops it."""
        episode = await asyncio.to_thread(OwnEpisode, data.environment, data.arguments)
        with contextlib.closing(episode):
            await asyncio.to_thread(episode.reset, seed=data.seed, task=data.task)
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                await _play(episode, client, ctx.model, trace)
        if episode.truncated and not episode.terminated:
            trace.stop("max_turns")
        return _DONE


async def _play(
    episode: OwnEpisode, client: openai.AsyncOpenAI, model: str, trace: vf.Trace
) -> None:
    turns = trace.info["turns"] = []
    _note(trace, episode)
    while not episode.is_over:
        try:
            action = await _ask(client, model, episode)
        except openai.APIStatusError:
            if trace.stop_condition is None:
                raise
            return  # stopped by a limit: what was earned counts
        await asyncio.to_thread(episode.step, action)
        told = {"observation": episode.observation, "reward": episode.reward}
        turns.append(told | episode.summary)
        _note(trace, episode)


async def _ask(client: openai.AsyncOpenAI, model: str, episode: OwnEpisode) -> str:
    tools: Any = {"tools": episode.tools} if episode.tools else {}
    messages: Any = episode.messages
    reply = await client.chat.completions.create(model=model, messages=messages, **tools)
    said = reply.choices[0].message
    calls = [
        FunctionCall(name=call.function.name, arguments=call.function.arguments)
        for call in said.tool_calls or ()
        if call.type == "function"
    ]
    return episode.action(said.content or "", calls)


def _note(trace: Any, episode: OwnEpisode) -> None:
    """Keep what the episode earned so far: it counts also if it is stopped."""
    trace.state.reward_terms = dict(episode.reward_terms)
    trace.state.metrics = dict(episode.info.get("metrics", {}))


Program = Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]


def environment_program(config: Mapping[str, Any]) -> Program:
    """Return a program (``--program``, `ProgramTasks`) that plays an environment of verifiers.

    A row of its tasks is ``{"task": 3}``, the place of a task in its taskset. The reward of an
    episode is that of its trace; of an environment with several agents, of all their traces.
    Episodes that wait do so side by side.

    Args:
        config: As for ``vf.resolve_env_config``: ``{"taskset": {"id": ...}, "agent": {...}}``.
    """
    checked = vf.resolve_env_config(dict(config))

    async def run(session: Any, task: dict[str, Any]) -> dict[str, Any]:
        env = await asyncio.to_thread(vf.load_environment, checked)
        place = int(task["task"])
        chosen = next(iter(env.taskset.skip(place).take(1)), None)
        if chosen is None:
            raise ConfigurationError(f"The taskset {checked.env_id} has no task {place}.")
        with _key_of(session) as variable:
            client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
            async with env.serving():
                context = vf.ModelContext(model="policy", client=client)
                episode = await env.run_episode(chosen, context)
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            raise RolloutError(f"verifiers: {'; '.join(map(str, errors)) or 'the episode failed'}")
        metrics = {name: value for trace in episode.traces for name, value in _metrics(trace)}
        return {"reward": sum(trace.reward for trace in episode.traces), "metrics": metrics}

    return run


def _metrics(trace: Any) -> Iterator[tuple[str, float]]:
    rewards = {f"rewards/{name}": r and r.value for name, r in trace.rewards.items()}
    for name, value in (trace.metrics | rewards).items():
        if value is not None:  # it was not scored
            yield name, float(value)


@contextlib.contextmanager
def _key_of(session: Any) -> Iterator[str]:
    """Name a variable that holds the session's key: verifiers takes keys from there only."""
    variable = f"AGENT_R1_SESSION_{secrets.token_hex(8).upper()}"
    os.environ[variable] = session.key
    try:
        yield variable
    finally:
        del os.environ[variable]
