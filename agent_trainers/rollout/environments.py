"""Environments of a rollout: a pool that reuses them, and checks of the values they return."""

import contextlib
import json
import logging
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import gymnasium as gym
import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    Strict,
    StrictStr,
    ValidationError,
    ValidationInfo,
)

from agent_envs.wrappers.awaited import awaited
from agent_trainers.policies.policy import Policy
from agent_trainers.trajectory import Number, Reward, plain_value

TextEnv = gym.Env[str, str]
MakeEnv = Callable[[], TextEnv]

_KNOWN_WRAPPERS: Final = ("gymnasium.", "agent_envs.")
_log = logging.getLogger(__name__)


class EnvPool:
    """Makes environments on demand and keeps idle ones for later episodes."""

    def __init__(self, make_env: MakeEnv | Mapping[str, MakeEnv]) -> None:
        """Make environments with `make_env`, or with the entry of their name."""
        self._make_env = make_env
        self._idle: defaultdict[str, list[TextEnv]] = defaultdict(list)

    def take(self, name: str = "") -> TextEnv:
        """Return an idle environment of this name, or a new one."""
        with contextlib.suppress(IndexError):  # threads may share the pool
            return self._idle[name].pop()
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


def describe_env(env: TextEnv) -> dict[str, Any]:
    """Return ``env_id`` and ``env_kwargs`` of a trajectory; nothing if `gym.make` made no `env`."""
    if (spec := env.unwrapped.spec) is None:
        return {}
    kwargs, limit = dict(spec.kwargs), None
    if env.has_wrapper_attr("_max_episode_steps"):
        limit = env.get_wrapper_attr("_max_episode_steps")
    if limit != getattr(gym.registry.get(spec.id), "max_episode_steps", None):
        kwargs["max_episode_steps"] = limit
    env_id, entry = spec.id, spec.entry_point
    if spec.namespace != "AgentR1":  # the module that registers it is part of its id
        module = entry.split(":")[0] if isinstance(entry, str) else entry.__module__
        env_id = f"{module}:{env_id}"
    text = json.dumps(kwargs, default=plain_value, skipkeys=True)
    return {"env_id": env_id, "env_kwargs": json.loads(text)}


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

    The environment says so by ``is_immediate``; no foreign wrapper may be around it.
    """
    try:
        while isinstance(env, gym.Wrapper):
            if not type(env).__module__.startswith(_KNOWN_WRAPPERS):
                return False
            env = env.env
        return bool(getattr(env, "is_immediate", False))
    except Exception:  # noqa: BLE001 - foreign code; a thread and a deadline are never wrong
        return False


_PLAIN: Final = BeforeValidator(lambda x: x.item() if isinstance(x, np.generic) else x)
_AS_FLAG: Final = BeforeValidator(lambda x: bool(x) if type(x) is int and x in (0, 1) else x)
_Flag = Annotated[bool, Strict(), _AS_FLAG, _PLAIN]


class _Message(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, JsonValue]
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr


class _Info(BaseModel):
    messages: Annotated[Sequence[_Message] | None, Field(min_length=1)] = None
    tools: list[dict[str, JsonValue]] | None = None
    metrics: dict[StrictStr, Number] = {}
    reward_terms: dict[StrictStr, Reward] = {}
    task_id: Annotated[str | int | None, _PLAIN] = None
    tool_result: StrictStr | None = None
    action: Mapping[str, Any] | None = None
    context: Mapping[str, Any] | None = None


def _checked(info: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
    is_over = others.data.get("terminated", False)  # then it describes no state
    unused = ("messages", "tools") if is_over else ()
    _Info.model_validate({name: value for name, value in info.items() if name not in unused})
    return info


class StepAnswer(BaseModel):
    """Checked result of `step`, or of `reset`, which has only an observation and `info`."""

    observation: StrictStr
    reward: Reward = 0.0
    terminated: _Flag = False
    truncated: _Flag = False
    info: Annotated[dict[str, Any], Strict(), AfterValidator(_checked)]


def read_reset(answer: Any) -> dict[str, Any]:
    """Return the checked `info` of a reset; a TypeError names a wrong part and its value."""
    return _read(("observation", "info"), "reset", answer).info


def read_step(answer: Any) -> StepAnswer:
    """Return the checked result of a step, as `read_reset`; after the end it needs no state."""
    return _read(tuple(StepAnswer.model_fields), "step", answer)


def _read(names: tuple[str, ...], method: str, answer: Any) -> StepAnswer:
    if not isinstance(answer, tuple | list) or len(answer) != len(names):
        raise TypeError(f"{method}() returned {reprlib.repr(answer)}; it must return {names}.")
    try:
        step = StepAnswer.model_validate(dict(zip(names, answer, strict=True)))
    except ValidationError as error:
        raise TypeError(f"{method}() returned a malformed result: {error}") from None
    if not step.terminated and step.info.get("messages") is None:
        raise TypeError(f"{method}() returned an info without messages.")
    return step
