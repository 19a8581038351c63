"""inspect_ai: any environment of ours as a `Task`.

::

    from inspect_ai import eval
    from agent_envs.adapters.inspect_ai import agent_r1

    eval(agent_r1("AgentR1/HotpotQA-v0", num_tasks=100, data="hotpotqa.jsonl.gz"), model="...")

or ``inspect eval agent_envs/adapters/inspect_ai.py@agent_r1 -T environment=AgentR1/GSM8K-v0``. A
sample is a task; its solver asks the model for each turn in the state that the environment decides,
contexts and all. Scores are ``success``, the return, and each metric and reward term of the
episode. ``state.metadata["turns"]`` says of each turn what it earned and how it ended.
"""

import contextlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import anyio
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    get_model,
)
from inspect_ai.scorer import Score, Scorer, Target, accuracy, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, ToolInfo

from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.core.chat_messages import ApiMessage
from agent_envs.core.openai_format import FunctionCall

_EPISODE: Final = "episode"
_TURNS: Final = "turns"


@task
def agent_r1(environment: str, num_tasks: int | None = None, seed: int = 0, **kwargs: Any) -> Task:
    """Make a task of an environment.

    Args:
        environment: Its Gymnasium id.
        num_tasks: How many samples: the first tasks, all if None; of an endless family, drawn ones.
        seed: Seed of what is drawn here.
        kwargs: Its other arguments, as for ``gymnasium.make``.

    Raises:
        ConfigurationError: If `num_tasks` is not to be had.
    """
    probe = OwnEpisode(environment, kwargs)
    samples = []
    for index, seed_of_task in draw_tasks(environment, probe.env, num_tasks, seed):
        question = probe.reset(seed=seed_of_task, task=index)
        row = {"task": index, "seed": seed_of_task}
        samples.append(Sample(input=question, id=probe.info["task_id"], metadata=row))
    probe.close()
    return Task(
        dataset=MemoryDataset(samples, name=environment),
        solver=play(environment, kwargs),
        scorer=[success(), earned()],
        name=environment.replace("/", "_"),
    )


@solver
def play(environment: str, kwargs: Mapping[str, Any]) -> Solver:
    """Play the sample's episode: what the model writes is the action, until the episode ends."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        del generate  # it would call the tools itself, in a conversation of its own
        episode = await anyio.to_thread.run_sync(OwnEpisode, environment, kwargs)
        with contextlib.closing(episode):
            row = state.metadata
            begin = partial(episode.reset, seed=row["seed"], task=row["task"])
            await anyio.to_thread.run_sync(begin)
            await _play(episode, state)
        return state

    return solve


async def _play(episode: OwnEpisode, state: TaskState) -> None:
    turns = state.metadata[_TURNS] = []
    _show(episode, state)
    while not episode.is_over:
        tools = [ToolInfo.model_validate(tool["function"]) for tool in episode.tools]
        state.output = await get_model().generate(state.messages, tools)
        said = state.output.message
        calls = [
            FunctionCall(name=c.function, arguments=c.parse_error or json.dumps(c.arguments))
            for c in said.tool_calls or ()
        ]
        await anyio.to_thread.run_sync(episode.step, episode.action(said.text, calls))
        told = {"observation": episode.observation, "reward": episode.reward}
        turns.append(told | episode.summary)
        _show(episode, state)


def _show(episode: OwnEpisode, state: TaskState) -> None:
    """Put the episode into the sample's state; a limit may end it at any turn."""
    terms = {f"rewards/{name}": value for name, value in episode.reward_terms.items()}
    metrics = episode.info.get("metrics", {})
    state.metadata[_EPISODE] = {**metrics, "return": episode.episode_return, **terms}
    state.messages = [_chat_message(message) for message in episode.messages]


def _chat_message(message: ApiMessage) -> ChatMessage:
    # inspect_ai's own messages_from_openai asks for a release of openai that verifiers refuses.
    content = message["content"] or ""
    if message["role"] == "system":
        return ChatMessageSystem(content=content)
    if message["role"] == "tool":
        return ChatMessageTool(content=content, tool_call_id=message["tool_call_id"])
    if message["role"] == "user":
        return ChatMessageUser(content=content)
    named = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    calls = [
        ToolCall(id=id, function=call["name"], arguments=json.loads(call["arguments"]))
        for id, call in named
    ]
    return ChatMessageAssistant(content=content, tool_calls=calls or None)


@scorer(metrics=[accuracy(), stderr()])
def success() -> Scorer:
    """Score whether the environment counts the episode as a success."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=state.metadata.get(_EPISODE, {}).get("success", 0.0))

    return score


@scorer(metrics={"*": [mean(), stderr()]})
def earned() -> Scorer:
    """Score the return, each metric, and the sum of each reward term as ``rewards/<term>``."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=dict(state.metadata.get(_EPISODE, {"return": 0.0})))

    return score
