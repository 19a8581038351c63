"""verifiers v1: our environments as a `Taskset` and a `Harness`, and its environments as programs.

The harness runs in the process of verifiers and calls its endpoint for each turn, in the state that
the environment decides: a context that drops messages is another branch of the trace. The reward of
a trace is the return, with one named reward per term; ``trace.info["turns"]`` has the rewards of
the turns. The turn limit stops a trace as ``max_turns``, which verifiers counts as truncated.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import openai
import pydantic
import verifiers.v1 as vf

from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.formats.openai_format import FunctionCall

__all__ = ["GymnasiumHarness", "GymnasiumTaskset", "environment_program"]


class GymnasiumTasksetConfig(vf.TasksetConfig):
    """An environment and its tasks."""

    environment: str = ""
    """Its Gymnasium id."""
    arguments: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Its other arguments, as for ``gymnasium.make``."""
    num_tasks: int | None = None
    """Number of tasks; see `draw_tasks`."""
    seed: int = 0
    """See `draw_tasks`."""


class EpisodeData(vf.TaskData):
    """The task of an episode."""

    environment: str
    arguments: dict[str, Any]
    task: int
    seed: int


class EpisodeState(vf.State):
    """The totals of the episode so far."""

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
        metrics: dict[str, float] = trace.state.metrics
        return metrics


class GymnasiumTaskset(vf.Taskset[EpisodeTask, GymnasiumTasksetConfig]):
    """The tasks of an environment."""

    def load(self) -> Iterator[EpisodeTask]:
        config = self.config
        if not config.environment:
            raise ConfigurationError("Name an environment: --env.taskset.environment AgentR1/...")
        episode = OwnEpisode(config.environment, config.arguments)
        for index, seed in draw_tasks(
            config.environment, episode.env, config.num_tasks, config.seed
        ):
            question = episode.reset(seed=seed, task=index)
            data = EpisodeData(
                id=episode.info["task_id"],
                prompt=question,  # for display: the harness gets it from the environment
                environment=config.environment,
                arguments=config.arguments,
                task=index,
                seed=seed,
            )
            yield EpisodeTask(data, config.task)


class GymnasiumHarness(vf.Harness[vf.HarnessConfig]):
    """Runs the episode of an `EpisodeTask`."""

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
        """Run until the episode ends, or verifiers stops it."""
        episode = await asyncio.to_thread(OwnEpisode, data.environment, data.arguments)
        with contextlib.closing(episode):
            await asyncio.to_thread(episode.reset, seed=data.seed, task=data.task)
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                await _run(episode, client, ctx.model, trace)
        if episode.truncated and not episode.terminated:
            trace.stop("max_turns")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _run(
    episode: OwnEpisode, client: openai.AsyncOpenAI, model: str, trace: vf.Trace
) -> None:
    turns = trace.info["turns"] = []
    _update(trace, episode)
    while not episode.is_over:
        tools: Any = {"tools": episode.tools} if episode.tools else {}
        messages: Any = episode.messages
        try:
            reply = await client.chat.completions.create(model=model, messages=messages, **tools)
        except openai.APIStatusError:
            if trace.stop_condition is None:
                raise
            return  # stopped by a limit; the rewards so far count
        message = reply.choices[0].message
        calls = [
            FunctionCall(name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
            if call.type == "function"
        ]
        turns.append(await asyncio.to_thread(episode.take_turn, message.content or "", calls))
        _update(trace, episode)


def _update(trace: Any, episode: OwnEpisode) -> None:
    """Write the totals into the trace, since a limit may stop it after any turn."""
    trace.state.reward_terms = dict(episode.reward_terms)
    trace.state.metrics = dict(episode.info.get("metrics", {}))


Program = Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]


def environment_program(config: Mapping[str, Any]) -> Program:
    """Return a program (``--program``, `ProgramTasks`) that runs an environment of verifiers.

    `config` is that of ``vf.resolve_env_config``; its agents run as subprocesses unless it says
    otherwise, since verifiers' default opens a tunnel. A row of its tasks is ``{"task": 3}``, an
    index in its taskset. The reward of an episode is the sum of its agents' traces.
    """
    checked = vf.resolve_env_config({"agent": {"runtime": {"type": "subprocess"}}, **config})

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
        if value is not None:  # None: not scored
            yield name, float(value)


@contextlib.contextmanager
def _key_of(session: Any) -> Iterator[str]:
    """Put the session's key into an environment variable, where verifiers reads keys."""
    variable = f"AGENT_R1_SESSION_{secrets.token_hex(8).upper()}"
    os.environ[variable] = session.key
    try:
        yield variable
    finally:
        del os.environ[variable]
