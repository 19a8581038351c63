"""Environments of a rollout: a pool that reuses them, and checks of the values they return."""

import logging
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import gymnasium as gym
import numpy as np
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    Strict,
    StrictStr,
    ValidationError,
)

from agent_envs.wrappers.awaited import awaited
from agent_trainers.policies.policy import Policy

TextEnv = gym.Env[str, str]
MakeEnv = Callable[[], TextEnv]

_KNOWN_WRAPPERS: Final = ("gymnasium.", "agent_envs.")
T = TypeVar("T", bound=BaseModel)
_log = logging.getLogger(__name__)


class EnvPool:
    """Makes environments on demand and keeps idle ones for later episodes."""

    def __init__(self, make_env: MakeEnv | Mapping[str, MakeEnv]) -> None:
        """Make environments with `make_env`, or with the entry of their name."""
        self._make_env = make_env
        self._idle: defaultdict[str, list[TextEnv]] = defaultdict(list)

    def take(self, name: str = "") -> TextEnv:
        """Return an idle environment of this name, or a new one."""
        if idle := self._idle[name]:
            return idle.pop()
        make_env = self._make_env if callable(self._make_env) else self._make_env[name]
        env = make_env()
        if not isinstance(env, gym.Env):
            raise TypeError(
                f"make_env returned a {type(env).__name__}; it must return a Gymnasium environment."
            )
        return awaited(env)

    def give_back(self, env: TextEnv, name: str = "") -> None:
        """Keep an environment for the next episode."""
        self._idle[name].append(env)

    def close(self) -> None:
        """Close the idle environments."""
        for env in [env for idle in self._idle.values() for env in idle]:
            try:
                env.close()
            except (Exception, SystemExit):  # noqa: BLE001 - foreign code; its episodes are over
                _log.warning("An environment failed to close.", exc_info=True)
        self._idle.clear()


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


_PLAIN: Final = BeforeValidator(lambda x: x.item() if isinstance(x, np.generic) else x)
_AS_NUMBER: Final = BeforeValidator(lambda x: float(x) if isinstance(x, bool) else x)
_AS_FLAG: Final = BeforeValidator(lambda x: bool(x) if type(x) is int and x in (0, 1) else x)
_Flag = Annotated[bool, Strict(), _AS_FLAG, _PLAIN]
_Number = Annotated[float, Strict(), AllowInfNan(False), _AS_NUMBER, _PLAIN]


class _Message(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, JsonValue]
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr


class _Info(BaseModel):
    metrics: dict[StrictStr, _Number] = {}
    reward_terms: dict[StrictStr, _Number] = {}
    task_id: Annotated[str | int | None, _PLAIN] = None
    tool_result: StrictStr | None = None
    action: Mapping[str, Any] | None = None
    context: Mapping[str, Any] | None = None


class _State(_Info):
    messages: Annotated[Sequence[_Message], Field(min_length=1)]
    tools: list[dict[str, JsonValue]] | None = None


def _checked_by(kind: type[BaseModel]) -> AfterValidator:
    """Return a validator that checks a value and leaves it unchanged."""
    return AfterValidator(lambda value: (kind.model_validate(value), value)[1])


class _Reset(BaseModel):
    observation: StrictStr
    info: Annotated[dict[str, Any], Strict(), _checked_by(_State)]


class StepAnswer(BaseModel):
    """Checked result of `step`."""

    observation: StrictStr
    reward: _Number
    terminated: _Flag
    truncated: _Flag
    info: Annotated[dict[str, Any], Strict(), _checked_by(_Info)]


def read_reset(answer: Any) -> dict[str, Any]:
    """Return the `info` of a reset.

    Raises:
        TypeError: If a part has the wrong type; names the part and its value.
    """
    return _read(_Reset, "reset", answer).info


def read_step(answer: Any) -> StepAnswer:
    """Return the checked result of a step; after the end of a task it needs no state.

    Raises:
        TypeError: If a part has the wrong type; names the part and its value.
    """
    step = _read(StepAnswer, "step", answer)
    if not step.terminated:
        _read(_Reset, "step", (step.observation, step.info))
    return step


def _read(kind: type[T], method: str, answer: Any) -> T:
    names = tuple(kind.model_fields)
    try:
        if isinstance(answer, tuple | list) and len(answer) == len(names):
            return kind.model_validate(dict(zip(names, answer, strict=True)))
    except ValidationError as error:
        raise TypeError(f"{method}() returned a malformed result: {error}") from None
    raise TypeError(f"{method}() returned {reprlib.repr(answer)}; it must return {names}.")
