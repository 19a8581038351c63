"""inspect_ai: any environment of ours as a `Task`, and any `Task` as a program.

::

    from inspect_ai import eval
    from agent_envs.adapters.inspect_ai import agent_r1

    eval(agent_r1("AgentR1/HotpotQA-v0", num_tasks=100, data="hotpotqa.jsonl.gz"), model="...")

or ``inspect eval agent_envs/adapters/inspect_ai.py@agent_r1 -T environment=AgentR1/GSM8K-v0``. A
sample is a task; its solver asks the model for each turn in the state that the environment decides,
contexts and all. Scores are ``success``, the return, and each metric and reward term of the
episode. ``state.metadata["turns"]`` says of each turn what it earned and how it ended.

The other way round, a `Task` is a program that asks a model: `task_program` makes one for
``agent-r1-train --program``, with its solvers, tools and scorers as they are.
"""

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import anyio
from inspect_ai import Task, task, task_with
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    get_model,
)
from inspect_ai.scorer import (
    Score,
    Scorer,
    Target,
    accuracy,
    mean,
    scorer,
    stderr,
    value_to_float,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, ToolInfo

from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.formats.chat_messages import ApiMessage
from agent_envs.formats.openai_format import FunctionCall

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


_ONE_AT_A_TIME: Final = threading.Lock()
"""inspect_ai evaluates one task at a time in a process."""
Program = Callable[[Any, dict[str, Any]], dict[str, Any]]


def task_program(make_task: Callable[[], Task], *, reward: str | None = None) -> Program:
    """Return a program that plays a task of inspect_ai, for ``--program`` and `ProgramTasks`.

    A row of its tasks is ``{"task": 3}``, the place of a sample in its dataset. Metrics are what
    its scorers say. Episodes of a process take turns: ``--program_runner process`` plays them side
    by side.

    Args:
        make_task: Makes the task, anew for each episode.
        reward: Whose score is the reward: the name of a scorer, or ``scorer/name`` of one that
            says several things. None: the first.
    """

    def run(session: Any, row: dict[str, Any]) -> dict[str, Any]:
        whole = make_task()
        place = int(row["task"])
        if not 0 <= place < len(whole.dataset):
            raise ConfigurationError(f"{whole.name} has {len(whole.dataset)} samples; no {place}.")
        sample = whole.dataset[place]
        one = task_with(whole, dataset=MemoryDataset([sample]), epochs=1)
        model = get_model(
            "openai-api/agent/policy", base_url=session.base_url, api_key=session.key, memoize=False
        )
        with _ONE_AT_A_TIME, tempfile.TemporaryDirectory() as logs:
            (log,) = evaluate(one, model=model, display="none", log_dir=logs, log_format="json")
        played = (log.samples or [None])[0]
        error = log.error or (played.error if played is not None else None)
        if played is None or error is not None:
            raise RolloutError(f"inspect_ai: {error.message if error else 'nothing was played'}")
        scores = dict(_numbers(played.scores or {}))
        if not scores or (reward is not None and reward not in scores):
            there = ", ".join(scores) or "none"
            raise ConfigurationError(f"There is no score {reward or ''} of a sample: {there}.")
        return {"reward": scores[reward or next(iter(scores))], "metrics": scores}

    return run


def _numbers(scores: Mapping[str, Score]) -> Iterator[tuple[str, float]]:
    """Yield what scorers said as numbers: ``C`` is 1, ``I`` is 0."""
    number = value_to_float()
    for name, score in scores.items():
        if isinstance(score.value, Mapping):
            yield from ((f"{name}/{key}", number(each)) for key, each in score.value.items())
        elif not isinstance(score.value, list | tuple):
            yield name, number(score.value)
