"""What an environment answers, checked where it is read: environments are foreign code.

Each check says which method answered what, and what it must be, for the author of the environment.
"""

import inspect
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

_RESET: Final = ("observation", "info")
_STEP: Final = ("observation", "reward", "terminated", "truncated", "info")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MESSAGES_FORM: Final = (
    'a list, not empty, of {"role": ..., "content": ...} with texts, as a chat template takes it'
)


class StepAnswer(NamedTuple):
    """What `step` answered."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def read_reset(answer: Any) -> dict[str, Any]:
    """Return the `info` of a reset.

    Raises:
        TypeError: If `answer` is none; says what it is, and what it must be.
    """
    observation, info = _parts(answer, "reset", _RESET)
    _expect(isinstance(observation, str), "the observation", "reset", observation, "a text")
    _check_info(info, "reset", has_state=True)
    checked: dict[str, Any] = info
    return checked


def read_step(answer: Any) -> StepAnswer:
    """Return what a step answered.

    Raises:
        TypeError: If `answer` is none; says what it is, and what it must be.
    """
    observation, reward, terminated, truncated, info = _parts(answer, "step", _STEP)
    _expect(isinstance(observation, str), "the observation", "step", observation, "a text")
    _expect(_is_number(reward), "the reward", "step", reward, "a finite number")
    _expect(_is_claim(terminated), "terminated", "step", terminated, "True or False")
    _expect(_is_claim(truncated), "truncated", "step", truncated, "True or False")
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
    """Check what `info` holds; after the end of a task there need be no state."""
    _expect(isinstance(info, dict), "info", method, info, "a dictionary")

    def check(name: str, is_right: Callable[[Any], bool], form: str) -> None:
        if name in info:
            _expect(is_right(info[name]), f"info[{name!r}]", method, info[name], form)

    for name in ("metrics", "reward_terms"):
        check(name, _maps_to_numbers, "a dictionary that maps names to finite numbers")
    check("task_id", lambda x: x is None or isinstance(x, str | int | np.integer), "a text")
    check("tool_result", lambda x: x is None or isinstance(x, str), "a text, or None")
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
        form = f"of a message {', '.join(_ROLES)}"
        _expect(role in _ROLES, "the role in info['messages']", method, role, form)


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


def _is_claim(value: Any) -> bool:
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
    if tools is None:
        return True
    return (
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
