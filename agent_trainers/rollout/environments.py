"""Environments of a rollout: a pool that reuses them, and checks of the values they return."""

import inspect
import json
import logging
import math
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np

from agent_envs.errors import AgentEnvsError, ServerError
from agent_envs.wrappers.awaited import awaited
from agent_trainers.policies.policy import Policy

TextEnv = gym.Env[str, str]
MakeEnv = Callable[[], TextEnv]

_KNOWN_WRAPPERS: Final = ("gymnasium.", "agent_envs.")
_RESET: Final = ("observation", "info")
_STEP: Final = ("observation", "reward", "terminated", "truncated", "info")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MESSAGES_FORM: Final = (
    'a non-empty list of {"role": ..., "content": ...} with strings, as a chat template takes it'
)
_log = logging.getLogger(__name__)


class EnvPool:
    """Makes environments on demand and keeps idle ones for later episodes."""

    def __init__(self, make_env: MakeEnv | Mapping[str, MakeEnv]) -> None:
        """Make environments with `make_env`, or with the entry of their name."""
        self._make_env = make_env
        self._idle: defaultdict[str, list[TextEnv]] = defaultdict(list)

    def take(self, name: str = "") -> TextEnv:
        """Return an idle environment of this name, or a new one.

        Raises:
            AgentEnvsError: If settings or data are wrong. Any other error of the constructor is
                raised by the first reset, so that it ends one episode only.
        """
        if idle := self._idle[name]:
            return idle.pop()
        make_env = self._make_env if callable(self._make_env) else self._make_env[name]
        try:
            env = make_env()
            if not isinstance(env, gym.Env):
                raise TypeError(
                    f"make_env returned a {type(env).__name__}; it must return a Gymnasium "
                    "environment."
                )
            return awaited(env)
        except ServerError as error:
            return _FailedEnv(error)  # a server of environments may come back
        except AgentEnvsError:
            raise  # no episode would ever work
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; it is recorded
            return _FailedEnv(error)

    def give_back(self, env: TextEnv, name: str = "") -> None:
        """Keep an environment for the next episode."""
        if not isinstance(env, _FailedEnv):
            self._idle[name].append(env)

    def close(self) -> None:
        """Close the idle environments."""
        for env in [env for idle in self._idle.values() for env in idle]:
            try:
                env.close()
            except (Exception, SystemExit):  # noqa: BLE001 - foreign code; its episodes are over
                _log.warning("An environment failed to close.", exc_info=True)
        self._idle.clear()


class _FailedEnv(gym.Env[str, str]):
    """Placeholder of an environment whose constructor failed; `reset` raises the error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise self._error


def template_tools(info: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template describes; None where the messages describe them."""
    tools: list[dict[str, Any]] = info.get("tools") or []
    return tools if info.get("is_native_format", True) else None


def lend_tokenizer(policy: Policy, env: TextEnv, info: dict[str, Any]) -> None:
    """Let the context policy of an environment count in the tokens of `policy`."""
    inner = env.unwrapped
    if hasattr(inner, "set_token_counter"):
        tools = template_tools(info)
        inner.set_token_counter(lambda messages: policy.count_tokens(messages, tools))


def is_immediate(env: TextEnv) -> bool:
    """Return whether an environment only computes, so that it needs no thread and no deadline.

    The environment says so by ``is_immediate``; a foreign wrapper around it needs the same
    attribute in its own class.
    """
    try:
        while isinstance(env, gym.Wrapper):
            only_computes = vars(type(env)).get("is_immediate", False)
            if not (only_computes or type(env).__module__.startswith(_KNOWN_WRAPPERS)):
                return False
            env = env.env
        return bool(getattr(env, "is_immediate", False))
    except Exception:  # noqa: BLE001 - foreign code; a thread and a deadline are never wrong
        return False


class StepAnswer(NamedTuple):
    """Checked result of `step`."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def read_reset(answer: Any) -> dict[str, Any]:
    """Return the `info` of a reset.

    Raises:
        TypeError: If a part has the wrong type; names the part, its value and the right type.
    """
    observation, info = _parts(answer, "reset", _RESET)
    _expect(isinstance(observation, str), "the observation", "reset", observation, "a string")
    _check_info(info, "reset", has_state=True)
    checked: dict[str, Any] = info
    return checked


def read_step(answer: Any) -> StepAnswer:
    """Return the checked result of a step.

    Raises:
        TypeError: If a part has the wrong type; names the part, its value and the right type.
    """
    observation, reward, terminated, truncated, info = _parts(answer, "step", _STEP)
    _expect(isinstance(observation, str), "the observation", "step", observation, "a string")
    _expect(_is_number(reward), "the reward", "step", reward, "a finite number")
    _expect(_is_flag(terminated), "terminated", "step", terminated, "True or False")
    _expect(_is_flag(truncated), "truncated", "step", truncated, "True or False")
    _check_info(info, "step", has_state=not terminated)
    return StepAnswer(float(reward), bool(terminated), bool(truncated), info)


def _parts(answer: Any, method: str, names: Sequence[str]) -> Any:
    if isinstance(answer, tuple | list) and len(answer) == len(names):
        return answer
    found = _show(answer)
    if inspect.iscoroutine(answer):
        found = "a coroutine"
        answer.close()
    raise TypeError(f"{method}() returned {found}; it must return ({', '.join(names)}).")


def _check_info(info: Any, method: str, *, has_state: bool) -> None:
    """Check the keys of `info`; after the end of a task it needs no state."""
    _expect(isinstance(info, dict), "info", method, info, "a dictionary")

    def check(name: str, is_right: Callable[[Any], bool], form: str) -> None:
        if name in info:
            _expect(is_right(info[name]), f"info[{name!r}]", method, info[name], form)

    for name in ("metrics", "reward_terms"):
        check(name, _maps_to_numbers, "a dictionary from names to finite numbers")
    check("task_id", lambda x: x is None or isinstance(x, str | int | np.integer), "a string")
    check("tool_result", lambda x: x is None or isinstance(x, str), "a string, or None")
    for name in ("action", "context"):
        check(name, lambda x: x is None or isinstance(x, Mapping), "a dictionary, or None")
    if not has_state:
        return
    check("tools", _are_tools, "a list of function schemas in the OpenAI format, or None")
    messages = info.get("messages")
    is_list = isinstance(messages, tuple | list) and len(messages) > 0
    is_right = is_list and all(map(_is_message, messages))
    _expect(is_right, "info['messages']", method, messages, _MESSAGES_FORM)
    for role in dict.fromkeys(message["role"] for message in messages):
        form = f"one of {', '.join(_ROLES)}"
        _expect(role in _ROLES, "a role in info['messages']", method, role, form)


def _expect(is_right: bool, what: str, method: str, found: Any, form: str) -> None:
    if not is_right:
        raise TypeError(f"{what} of {method}() is {_show(found)}; it must be {form}.")


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 - its own repr failed, and this is an error message
        return f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, bool | int | float | np.number | np.bool_)
    try:
        return is_number and math.isfinite(value)
    except (OverflowError, TypeError):  # too large for a float; complex
        return False


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or (type(value) is int and value in (0, 1))


def _maps_to_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_number(number) for name, number in value.items()
    )


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    is_text = all(isinstance(message.get(name), str) for name in ("role", "content"))
    # Most messages hold nothing else, and every state holds all of them.
    is_plain = len(message) == 2 or (len(message) == 3 and isinstance(message.get("name"), str))
    return is_text and (is_plain or _is_json(message))


def _are_tools(tools: Any) -> bool:
    return tools is None or (
        isinstance(tools, tuple | list)
        and all(isinstance(t, dict) for t in tools)
        and (not tools or _is_json(tools))
    )


def _is_json(value: Any) -> bool:
    try:
        json.dumps(dict(value) if isinstance(value, Mapping) else value)
    except (TypeError, ValueError, RecursionError):
        return False
    return all(isinstance(key, str) for key in value) if isinstance(value, Mapping) else True
