"""inspect_ai: our environments as a `Task`, and any `Task` as a program.

Also ``inspect eval agent_envs/adapters/inspect_ai.py@agent_r1 -T environment=AgentR1/GSM8K-v0``.
"""

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import anyio
import pydantic
from inspect_ai import Task, task, task_with
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessage, get_model
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
from inspect_ai.tool import ToolInfo

from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.formats.openai_format import ApiMessage, FunctionCall

_EPISODE: Final = "episode"
_TURNS: Final = "turns"
_CHAT_MESSAGE: Final[pydantic.TypeAdapter[ChatMessage]] = pydantic.TypeAdapter(ChatMessage)


@task
def agent_r1(environment: str, num_tasks: int | None = None, seed: int = 0, **kwargs: Any) -> Task:
    """Make a task of an environment; `kwargs` are its arguments, as for ``gymnasium.make``.

    For `num_tasks` and `seed` see `draw_tasks`.
    """
    probe = OwnEpisode(environment, kwargs)
    samples = []
    for index, task_seed in draw_tasks(environment, probe.env, num_tasks, seed):
        question = probe.reset(seed=task_seed, task=index)
        row = {"task": index, "seed": task_seed}
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
    """Run the sample's episode with the model's turns as actions."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        del generate  # it would call the tools itself, in its own conversation
        episode = await anyio.to_thread.run_sync(OwnEpisode, environment, kwargs)
        with contextlib.closing(episode):
            row = state.metadata
            begin = partial(episode.reset, seed=row["seed"], task=row["task"])
            await anyio.to_thread.run_sync(begin)
            turns = state.metadata[_TURNS] = []
            _update(state, episode)
            while not episode.is_over:
                tools = [ToolInfo.model_validate(tool["function"]) for tool in episode.tools]
                state.output = await get_model().generate(state.messages, tools)
                message = state.output.message
                calls = [
                    FunctionCall(
                        name=c.function, arguments=c.parse_error or json.dumps(c.arguments)
                    )
                    for c in message.tool_calls or ()
                ]
                turns.append(await anyio.to_thread.run_sync(episode.take_turn, message.text, calls))
                _update(state, episode)
        return state

    return solve


def _update(state: TaskState, episode: OwnEpisode) -> None:
    """Write the episode into the sample's state, since a limit may end it after any turn."""
    state.metadata[_EPISODE] = {**episode.totals, "return": episode.episode_return}
    state.messages = [_chat_message(message) for message in episode.messages]


def _chat_message(message: ApiMessage) -> ChatMessage:
    # inspect_ai's messages_from_openai needs a release of openai that verifiers refuses.
    converted = {**message, "content": message["content"] or ""}
    if "tool_calls" in message:
        converted["tool_calls"] = [
            {
                "id": call["id"],
                "function": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            }
            for call in message["tool_calls"]
        ]
    return _CHAT_MESSAGE.validate_python(converted)


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
"""inspect_ai evaluates one task at a time per process."""
Program = Callable[[Any, dict[str, Any]], dict[str, Any]]


def task_program(make_task: Callable[[], Task], *, reward: str | None = None) -> Program:
    """Return a program that runs a task of inspect_ai, for ``--program`` and `ProgramTasks`.

    A row of its tasks is ``{"task": 3}``, the index of a sample in its dataset. Metrics are the
    scores; `reward` is the one that is the reward, by default the first. Episodes of one process
    run one after the other; ``--program_runner process`` runs them concurrently.
    """

    def run(session: Any, row: dict[str, Any]) -> dict[str, Any]:
        whole = make_task()
        sample = whole.dataset[int(row["task"])]
        one = task_with(whole, dataset=MemoryDataset([sample]), epochs=1)
        model = get_model(
            "openai-api/agent/policy", base_url=session.base_url, api_key=session.key, memoize=False
        )
        with _ONE_AT_A_TIME, tempfile.TemporaryDirectory() as logs:
            (log,) = evaluate(one, model=model, display="none", log_dir=logs, log_format="json")
        finished = (log.samples or [None])[0]
        error = log.error or (finished.error if finished is not None else None)
        if finished is None or error is not None:
            raise RolloutError(f"inspect_ai: {error.message if error else 'no sample was run'}")
        scores = dict(_numbers(finished.scores or {}))
        if not scores or (reward is not None and reward not in scores):
            there = ", ".join(scores) or "none"
            raise ConfigurationError(
                f"A sample has no score {reward or ''}; its scores are: {there}."
            )
        return {"reward": scores[reward or next(iter(scores))], "metrics": scores}

    return run


def _numbers(scores: Mapping[str, Score]) -> Iterator[tuple[str, float]]:
    """Yield scores as numbers: ``C`` is 1, ``I`` is 0."""
    number = value_to_float()
    for name, score in scores.items():
        if isinstance(score.value, Mapping):
            yield from ((f"{name}/{key}", number(each)) for key, each in score.value.items())
        elif not isinstance(score.value, list | tuple):
            yield name, number(score.value)
