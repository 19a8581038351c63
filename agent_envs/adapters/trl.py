"""Any environment here as one of plain ``trl.GRPOTrainer``: each tool is a method that TRL calls.

::

    from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset

    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=GRPOConfig(max_tool_calling_iterations=4),  # turns less one: the last is the answer's
        train_dataset=tasks_dataset("AgentR1/HotpotQA-v0", num_tasks=500, data="hotpotqa.jsonl.gz"),
        environment_factory=environment_factory("AgentR1/HotpotQA-v0", data="hotpotqa.jsonl.gz"),
        reward_funcs=[environment_return],
    )

The loop is TRL's: contexts only grow, all calls of a turn are carried out (each is a step of the
environment), a turn without a call is the answer and ends the episode, and credit is one number per
episode, the sum of its rewards. `agent_trainers` has credit per step. TRL encodes what it is told,
so control tokens in it are broken up (`break_control_strings`).
"""

import copyreg
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import gymnasium as gym

from agent_envs.adapters.own_episode import check_appends, draw_tasks
from agent_envs.adapters.signatures import describe_as_function
from agent_envs.core.lookup import unknown_name_message
from agent_envs.core.tool import Tool
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError, UnknownNameError
from agent_envs.formats.control_strings import break_control_strings

if TYPE_CHECKING:
    import datasets

OVER_TEXT: Final = "The episode is over, and this call was not carried out."
FAILED_TEXT: Final = "The environment failed; the episode is over."
_READ_BY_TRL: Final = ("reset", "get_reward")
"""Methods that TRL does not take for tools."""

_log = logging.getLogger(__name__)


class _EnvironmentClass(type):
    """Class of the classes made here; they are pickled by what they were made of."""


class TRLEnvironment(metaclass=_EnvironmentClass):
    """Base of the classes that `environment_factory` makes; TRL makes one instance per generation.

    Whatever TRL would take for a tool has a name with an underscore.
    """

    _id: ClassVar[str]
    _kwargs: ClassVar[Mapping[str, Any]]
    _tool_names: ClassVar[frozenset[str]]

    def __init__(self) -> None:
        """Make nothing yet: the first `reset` makes the environment, later ones reuse it."""
        self._env: gym.Env[str, str] | None = None
        self._forget()

    def reset(self, seed: int | None = None, task: int | None = None, **row: Any) -> str:
        """Begin the episode of a dataset row.

        Args:
            seed: Seed of the environment, which draws the task if `task` is not given. The same in
                all rows of a group, so that its members share their task.
            task: The task's index.
            row: The other columns.

        Returns:
            The question, which TRL puts at the end of the prompt.

        Raises:
            ConfigurationError: If the row says neither seed nor task, or there is no such task.
        """
        if row and seed is None and task is None:
            raise ConfigurationError(
                "The dataset has neither a column 'seed' nor 'task', so the members of a group "
                "would get different tasks. tasks_dataset() makes one that has both."
            )
        self._forget()
        if self._env is None:
            self._env = gym.make(self._id, **self._kwargs)
        options = None if task is None else {"task": int(task)}
        seed = task if seed is None else seed
        observation, _ = self._env.reset(seed=None if seed is None else int(seed), options=options)
        self._terms = dict.fromkeys(self._env.unwrapped.reward_weights, 0.0)  # type: ignore[attr-defined]
        return break_control_strings(observation)

    def _forget(self) -> None:
        self._return, self._success, self._terms = 0.0, 0.0, dict[str, float]()
        self._num_steps = self._num_calls = 0
        self._is_over = self._is_finished = self._has_failed = False

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carry a tool call out; the environment judges its arguments."""
        if self._env is None:
            raise gym.error.ResetNeeded("No episode has begun; call reset() first.")
        self._num_calls += 1
        return self._step(self._env.unwrapped.write_call(name, **arguments))  # type: ignore[attr-defined]

    def _step(self, action: str) -> str:
        if self._is_over:
            return OVER_TEXT
        assert self._env is not None  # noqa: S101 - an episode has begun
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
        except Exception:  # noqa: BLE001 - foreign code; logged, and the episode is left out
            _log.warning("%s failed; its episode is left out.", self._id, exc_info=True)
            self._is_over, self._has_failed = True, True
            self._env = None  # it may be in any state
            return FAILED_TEXT
        self._num_steps += 1
        self._return += float(reward)
        for term, value in info["reward_terms"].items():
            self._terms[term] = self._terms.get(term, 0.0) + value
        self._success = float(info["metrics"].get("success", 0.0))
        self._is_over = terminated or truncated
        return break_control_strings(observation)

    def _finish(self, completion: Sequence[Mapping[str, Any]]) -> None:
        """Do what TRL leaves to do: the answer, or the calls beyond its limit of turns."""
        self._is_finished = True
        last = completion[-1]
        if last["role"] != "assistant":
            return
        if not last.get("tool_calls"):
            self._step(str(last.get("content") or ""))
            return
        # TRL may also carry out calls and then drop them and their results as too long
        calls = [call for message in completion for call in self._known_calls(message)]
        for call in calls[self._num_calls :]:
            self._call(call["name"], call["arguments"])

    def _known_calls(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the calls of a message that TRL can hand on to a method."""
        calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        return [
            call
            for call in calls
            if call.get("name") in self._tool_names and isinstance(call.get("arguments"), Mapping)
        ]


def environment_factory(id: str, /, **kwargs: Any) -> type[TRLEnvironment]:
    """Make a class for ``trl.GRPOTrainer(environment_factory=...)``.

    It has one method per tool, described by type hints and docstring as TRL wants it, and `reset`.

    Args:
        id: A Gymnasium id of ours.
        kwargs: Arguments of the environment, as for ``gymnasium.make``.

    Raises:
        ConfigurationError: If the environment cannot be played in TRL's loop, or a tool has a name
            that TRL reserves; says what to change.
    """
    probe = gym.make(id, **kwargs)
    _check_playable(id, probe)
    tools: Mapping[str, Tool] = probe.unwrapped.tools  # type: ignore[attr-defined]
    methods = {name: _method(tool) for name, tool in tools.items()}
    documentation = type(probe.unwrapped).__doc__
    probe.close()
    name = id.rpartition("/")[2].rpartition("-v")[0] or id
    members = {"__doc__": documentation, "__module__": __name__, "_id": id, "_kwargs": kwargs}
    tools_of = {"_tool_names": frozenset(methods), **methods}
    made = _EnvironmentClass(name, (TRLEnvironment,), members | tools_of)
    return cast(type[TRLEnvironment], made)


def environment_return(
    completions: Sequence[Sequence[Mapping[str, Any]]],
    environments: Sequence[Any],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the sum of each episode's rewards: a reward function for TRL.

    It ends the episodes: the last turn without a call is the answer. ``success`` and each reward
    term, as ``rewards/<term>``, are logged as means over the episodes.

    Args:
        completions: The messages of each episode after its prompt; TRL passes them.
        environments: Whose episodes they are; TRL passes them.
        log_metric: Logs a number; TRL passes it.

    Returns:
        One number per episode; None, which TRL leaves out, for one whose environment failed and for
        environments that were not made here.
    """
    _finish(completions, environments, log_metric)
    return [e._return if _is_scorable(e) else None for e in environments]


def reward_terms(names: Iterable[str]) -> list[Callable[..., list[float | None]]]:
    """Make a reward function of each term in `names`, in the place of `environment_return`.

    So TRL's ``reward_weights`` can weigh them, and its table of completions has a column for each.
    Each is summed over the episode and weighed by the environment; all terms of an environment
    together are its return. A name that no environment has is an `UnknownNameError` when called.
    """

    def make(name: str) -> Callable[..., list[float | None]]:
        def term(
            completions: Sequence[Sequence[Mapping[str, Any]]],
            environments: Sequence[Any],
            log_metric: Callable[[str, float], None] | None = None,
            **_: Any,
        ) -> list[float | None]:
            _finish(completions, environments, log_metric)
            known = {term: 0.0 for e in environments if _is_scorable(e) for term in e._terms}
            if known and name not in known:
                raise UnknownNameError(unknown_name_message(name, known, kind="reward term"))
            return [e._terms.get(name) if _is_scorable(e) else None for e in environments]

        term.__name__ = name  # TRL logs rewards/<name>/mean
        return term

    return [make(name) for name in names]


def tasks_dataset(
    id: str, /, num_tasks: int | None = None, seed: int = 0, **kwargs: Any
) -> "datasets.Dataset":
    """Make the ``train_dataset`` or ``eval_dataset`` of TRL's trainer.

    Args:
        id: A Gymnasium id of ours.
        num_tasks: How many rows: the first tasks of the environment, all of them if None; of an
            endless family, tasks drawn by `seed`.
        seed: Seed of what is drawn here.
        kwargs: Arguments of the environment.

    Returns:
        Rows with ``prompt`` (the environment's system prompt, and a user's turn that is empty until
        `reset` fills it with the question), ``task`` and ``seed``.

    Raises:
        ConfigurationError: If `num_tasks` is not to be had.
    """
    import datasets

    probe = gym.make(id, **kwargs)
    drawn = list(draw_tasks(id, probe, num_tasks, seed))
    _, info = probe.reset(seed=seed)
    probe.close()
    system = [message for message in info["messages"] if message["role"] == "system"]
    return datasets.Dataset.from_dict(
        {
            "prompt": [[*system, {"role": "user", "content": ""}]] * len(drawn),
            "task": [task for task, _ in drawn],
            "seed": [seed for _, seed in drawn],
        }
    )


def _method(tool: Tool) -> Callable[..., str]:
    if tool.name in _READ_BY_TRL or tool.name.startswith("_"):
        raise ConfigurationError(
            f"A tool for TRL cannot be called {tool.name!r}: TRL keeps {', '.join(_READ_BY_TRL)} "
            "and names that begin with an underscore for itself. Rename it: @tool(name=...)."
        )

    # Any keyword is taken, whatever the signature says: wrong arguments are the model's mistake,
    # and the environment's to judge.
    def call(self: TRLEnvironment, /, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    describe_as_function(call, tool)
    return call


def _check_playable(id: str, env: gym.Env[Any, Any]) -> None:
    """Refuse what TRL's loop would silently do otherwise than the environment means it."""
    if not isinstance(env.unwrapped, ToolEnv):
        raise ConfigurationError(f"{id} is no environment with tools (a ToolEnv).")
    if not env.unwrapped.action_format.is_native:
        raise ConfigurationError(
            f"tool_format={env.unwrapped.action_format.name!r} tells the model to write calls that "
            "TRL does not read. Leave it out: the chat template says how to call."
        )
    if type(env.unwrapped).tool_signatures and not env.unwrapped.tools:
        raise ConfigurationError(
            f"{id} has tools of its own for each task, but TRL's are the same for all. Use "
            "StepGRPOTrainer."
        )
    check_appends(id, env, "TRL")


def _is_scorable(environment: Any) -> bool:
    return isinstance(environment, TRLEnvironment) and not environment._has_failed


def _finish(
    completions: Sequence[Sequence[Mapping[str, Any]]],
    environments: Sequence[Any],
    log_metric: Callable[[str, float], None] | None,
) -> None:
    """End the episodes that still go on, and log them, once."""
    own = []
    for environment, completion in zip(environments, completions, strict=True):
        if isinstance(environment, TRLEnvironment) and not environment._is_finished:
            environment._finish(completion)
            own.append(environment)
    if log_metric is None or not own:
        return
    values: dict[str, list[float]] = {"episodes/failed": [float(e._has_failed) for e in own]}
    for environment in filter(_is_scorable, own):
        values.setdefault("success", []).append(environment._success)
        for term, value in environment._terms.items():
            values.setdefault(f"rewards/{term}", []).append(value)
    for name, numbers in values.items():
        log_metric(name, sum(numbers) / len(numbers))


def _reduce(cls: _EnvironmentClass) -> Any:
    """Say how to make a class again; TRL's asynchronous trainer sends it to another process."""
    if cls is TRLEnvironment:
        return cls.__name__
    return functools.partial(environment_factory, cls._id, **cls._kwargs), ()  # type: ignore[attr-defined]


copyreg.pickle(_EnvironmentClass, _reduce)
