"""Our environments in plain ``trl.GRPOTrainer``: each tool is a method that TRL calls.

The loop is TRL's: contexts only grow, each call of a turn is a step of the environment, a turn
without a call is the answer and ends the episode, and the credit is one number per episode, the sum
of its rewards.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Union

import gymnasium as gym
import pydantic

from agent_envs.adapters.own_episode import OwnEpisode, check_appends, draw_tasks
from agent_envs.core.tool import Tool
from agent_envs.errors import ConfigurationError
from agent_envs.formats.actions import ToolFormat

if TYPE_CHECKING:
    import datasets

OVER_TEXT: Final = "The episode is over, and this call was not carried out."
FAILED_TEXT: Final = "The environment failed; the episode is over."
_RESERVED: Final = ("reset", "get_reward")
"""Methods that are not tools for TRL."""
_TYPES: Final[Mapping[str, Any]] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "null": None, "object": dict,
    "array": list,
}  # fmt: skip
_SECTION: Final = re.compile(r"(Args|Returns|Raises):")
_NO_SECTION: Final = r"\1 :"
"""Headings of a docstring, which a text must not contain."""
Completion = Sequence[Mapping[str, Any]]
LogMetric = Callable[[str, float], None]

_log = logging.getLogger(__name__)


class TRLEnvironment:
    """Base of the classes of `environment_factory`; TRL makes one instance per generation.

    All names begin with an underscore that TRL would otherwise take for tools.
    """

    _id: ClassVar[str]
    _kwargs: ClassVar[Mapping[str, Any]]
    _tool_names: ClassVar[frozenset[str]]

    def __init__(self) -> None:
        """Start without an environment: the first `reset` makes it, later ones reuse it."""
        self._episode: OwnEpisode | None = None
        self._is_finished = self._has_failed = False
        self._num_calls = 0

    def reset(self, seed: int | None = None, task: int | None = None, **row: Any) -> str:
        """Begin the episode of a dataset row."""
        if row and seed is None and task is None:
            raise ConfigurationError(
                "The dataset has neither a column 'seed' nor 'task', so the members of a group "
                "would get different tasks. tasks_dataset() makes one that has both."
            )
        self._is_finished = self._has_failed = False
        self._num_calls = 0
        if self._episode is None:
            self._episode = OwnEpisode(self._id, self._kwargs)
        self._episode.reset(seed=task if seed is None else seed, task=task)
        return self._episode.text

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carry out a tool call; the environment validates its arguments."""
        self._num_calls += 1
        return self._step(lambda form: form.write_call(name, arguments))

    def _step(self, write: Callable[[ToolFormat], str]) -> str:
        episode = self._episode
        if episode is None or episode.is_over:
            return OVER_TEXT
        try:
            episode.step(write(episode.format))
        except Exception:  # noqa: BLE001 - foreign code; logged, and the episode is left out
            _log.warning("%s failed; its episode is left out.", self._id, exc_info=True)
            self._has_failed, self._episode = True, None  # it may be in any state
            return FAILED_TEXT
        return episode.text

    def _finish(self, completion: Completion) -> None:
        """Carry out what TRL does not: the answer, or the calls beyond its limit of turns."""
        self._is_finished = True
        last = completion[-1]
        if last["role"] != "assistant":
            return
        if not last.get("tool_calls"):
            self._step(lambda _: str(last.get("content") or ""))
            return
        # TRL may have carried out calls and dropped them and their results as too long
        calls = [call for message in completion for call in self._valid_calls(message)]
        for call in calls[self._num_calls :]:
            self._call(call["name"], call["arguments"])

    def _valid_calls(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the calls of a message that TRL can pass to a method."""
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        return [
            call
            for call in calls
            if call.get("name") in self._tool_names and isinstance(call.get("arguments"), Mapping)
        ]


def environment_factory(id: str, /, **kwargs: Any) -> type[TRLEnvironment]:
    """Make a class for ``trl.GRPOTrainer(environment_factory=...)``.

    It has `reset`, and one method per tool with type hints and docstring as TRL expects them.
    `kwargs` are arguments of the environment, as for ``gymnasium.make``.
    """
    probe = OwnEpisode(id, kwargs)
    env: Any = probe.env.unwrapped
    if not probe.format.is_native:
        raise ConfigurationError(
            f"tool_format={probe.format.name!r} tells the model to write calls that TRL does not "
            "read. Leave it out: the chat template says how to call."
        )
    if type(env).tool_signatures and not env.tools:
        raise ConfigurationError(
            f"{id} has different tools for each task, but TRL's are the same for all. Use "
            "StepGRPOTrainer."
        )
    check_appends(id, probe.env, "TRL")
    methods = {name: _method(tool) for name, tool in env.tools.items()}
    probe.close()
    name = id.rpartition("/")[2].rpartition("-v")[0] or id
    members: dict[str, Any] = {"__doc__": type(env).__doc__, "__module__": __name__, **methods}
    members |= {"_id": id, "_kwargs": kwargs, "_tool_names": frozenset(methods)}
    return type(name, (TRLEnvironment,), members)


def environment_return(
    completions: Sequence[Completion],
    environments: Sequence[Any],
    log_metric: LogMetric | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the sum of each episode's rewards: a reward function for TRL.

    It ends the episodes: the last turn without a call is the answer. ``success`` and each reward
    term, as ``rewards/<term>``, are logged as means over the episodes.

    An episode whose environment failed, or was not made here, has None, which TRL leaves out.
    """
    finished = []
    for environment, completion in zip(environments, completions, strict=True):
        if isinstance(environment, TRLEnvironment) and not environment._is_finished:
            environment._finish(completion)
            finished.append(environment)
    if log_metric is not None and finished:
        values = {"episodes/failed": [float(e._has_failed) for e in finished]}
        for episode in (e._episode for e in finished):
            if episode is not None:
                success = float(episode.info.get("metrics", {}).get("success", 0.0))
                values.setdefault("success", []).append(success)
                for term, value in episode.reward_terms.items():
                    values.setdefault(f"rewards/{term}", []).append(value)
        for name, numbers in values.items():
            log_metric(name, sum(numbers) / len(numbers))
    episodes = [e._episode if isinstance(e, TRLEnvironment) else None for e in environments]
    return [None if episode is None else episode.episode_return for episode in episodes]


def tasks_dataset(
    id: str, /, num_tasks: int | None = None, seed: int = 0, **kwargs: Any
) -> "datasets.Dataset":
    """Make the ``train_dataset`` or ``eval_dataset`` of TRL's trainer.

    Rows hold ``prompt`` (the environment's system prompt, and an empty user message that `reset`
    fills with the question), ``task`` and ``seed``. For `num_tasks` and `seed` see `draw_tasks`.
    """
    import datasets

    probe = gym.make(id, **kwargs)
    tasks, seeds = zip(*draw_tasks(id, probe, num_tasks, seed), strict=True)
    _, info = probe.reset(seed=seed)
    probe.close()
    system = [message for message in info["messages"] if message["role"] == "system"]
    prompt = [*system, {"role": "user", "content": ""}]
    return datasets.Dataset.from_dict(
        {"prompt": [prompt] * len(tasks), "task": tasks, "seed": seeds}
    )


def _method(tool: Tool) -> Callable[..., str]:
    if tool.name in _RESERVED or tool.name.startswith("_"):
        raise ConfigurationError(
            f"A tool for TRL cannot be called {tool.name!r}: TRL reserves {', '.join(_RESERVED)} "
            "and names that begin with an underscore. Rename it: @tool(name=...)."
        )

    # Any keyword is accepted: wrong arguments are the model's mistake, which the environment
    # reports.
    def call(self: TRLEnvironment, /, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    _describe(call, tool)
    return call


def _describe(method: Callable[..., str], tool: Tool) -> None:
    """Give a method the name, signature and docstring of a tool, as transformers reads them.

    An argument's text holds what hints cannot express: defaults, ranges, members of objects.
    """
    schema = tool.schema["function"]
    if "$defs" in schema["parameters"]:
        raise ConfigurationError(
            f"Tool {tool.name!r} has an enumeration or a model as an argument, which TRL cannot "
            "describe. Take a Literal or a dict."
        )
    required = schema["parameters"].get("required", [])
    parameters, lines = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)], []
    hints: dict[str, Any] = {}
    for name, argument in schema["parameters"].get("properties", {}).items():
        hint = hints[name] = _hint(argument)
        default = inspect.Parameter.empty if name in required else argument.get("default")
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=hint))
        text = " ".join(str(argument.get("description") or f"The {name}.").split())
        if argument.get("default") is not None:
            text += f" (default: {json.dumps(argument['default'], ensure_ascii=False)})"
        rest = {k: v for k, v in argument.items() if k not in ("description", "default")}
        if rest != pydantic.TypeAdapter(hint).json_schema():
            text += f" JSON schema: {json.dumps(rest, ensure_ascii=False)}"
        lines.append(f"    {name}: {_SECTION.sub(_NO_SECTION, text)}")
    method.__name__ = method.__qualname__ = schema["name"]
    method.__annotations__ = hints  # no return: the tool's schema has none either
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__doc__ = _SECTION.sub(_NO_SECTION, schema["description"])
    if lines:
        method.__doc__ += "\n\nArgs:\n" + "\n".join(lines)


def _hint(schema: Mapping[str, Any]) -> Any:
    """Return the closest type hint that transformers can read."""
    if "const" in schema or "enum" in schema:
        return Literal[tuple(schema.get("enum", [schema.get("const")]))]
    if "anyOf" in schema:
        return Union[tuple(map(_hint, schema["anyOf"]))]  # noqa: UP007 - a computed union
    kind = schema.get("type")
    if kind == "array" and schema.get("items"):
        return list[_hint(schema["items"])]  # type: ignore[misc]
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return dict[str, _hint(values)]  # type: ignore[misc]
    return _TYPES.get(str(kind), Any)
