"""One client's session on a server: an environment in its own thread."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from agent_envs.core.async_bridge import Worker
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.remote.protocol import (
    CALLER_ERRORS,
    KNOWN_ERRORS,
    ErrorCode,
    Refusal,
    Reset,
    Step,
    read_message,
    write_refusal,
    write_reply,
)
from agent_envs.wrappers.awaited import awaited

TextEnv = gym.Env[str, str]
Reply = tuple[str, dict[str, Any]]
_log = logging.getLogger(__name__)


class Session:
    """One environment for one client.

    Everything but `thread` and `is_over` belongs to that thread: messages are parsed, processed and
    answered there, so that long or slow ones delay no other client.
    """

    def __init__(self, make_env: Callable[[], TextEnv], *, with_reference: bool) -> None:
        """Start without an environment; the first reset makes it."""
        self.thread = Worker()
        self.is_over = False
        """Whether the episode has ended."""
        self._make_env, self._with_reference = make_env, with_reference
        self._made: TextEnv | None = None
        self._env: TextEnv | None = None
        self._num_steps = 0
        self._names: dict[str, str | None] = {"episode_id": None, "task_id": None}
        self._methods: dict[str, Callable[[Any], Reply]] = {
            "reset": self._reset, "step": self._step, "state": self._state,
            "reference_actions": self._reference_actions,
        }  # fmt: skip

    def handle(self, text: str) -> str | None:
        """Process a message and return the reply; None for ``close``."""
        try:
            kind, data = read_message(text)
            return None if kind == "close" else self._process(kind, data)
        except Refusal as refusal:
            return write_refusal(refusal)

    def close(self) -> None:
        """Close the environment."""
        env, self._made, self._env = self._made, None, None
        try:
            if env is not None:
                env.close()
        except (Exception, SystemExit):  # noqa: BLE001 - foreign code; its episodes are over
            _log.warning("An environment failed to close.", exc_info=True)

    def _process(self, kind: str, data: Any) -> str:
        try:
            return write_reply(*self._methods[kind](data))
        except Refusal:
            raise
        except CALLER_ERRORS as error:
            name = type(error).__name__
            raise Refusal(ErrorCode.EXECUTION_ERROR, str(error), name) from error
        except (Exception, SystemExit) as error:
            # Foreign code failed in an unknown state: the next episode gets a new environment.
            _log.warning("An environment failed at a %s message.", kind, exc_info=True)
            self.close()
            name = type(error).__name__
            text = str(error) if name in KNOWN_ERRORS else f"{name}; see the server's log."
            raise Refusal(ErrorCode.EXECUTION_ERROR, text, name) from error

    def _reset(self, data: Reset) -> Reply:
        if self._made is None:
            try:
                self._made = awaited(self._make_env())
            except (Exception, SystemExit) as error:
                _log.warning("The environment could not be made.", exc_info=True)
                text = f"The environment could not be made ({type(error).__name__})."
                raise Refusal(ErrorCode.FACTORY_ERROR, text) from error
        limit = data.turn_limit
        self._env = self._made if limit is None else TimeLimit(self._made, limit)
        if data.generator is not None:
            try:
                self._made.unwrapped.np_random.bit_generator.state = data.generator
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                text = f"generator: not the state of a random generator: {error}"
                raise Refusal(ErrorCode.VALIDATION_ERROR, text) from None
        observation, info = self._env.reset(seed=data.seed, options=data.options)
        self._num_steps, self._names["episode_id"] = 0, data.episode_id
        return self._observation(observation, None, False, False, info)

    def _step(self, data: Step) -> Reply:
        observation, reward, terminated, truncated, info = self._begun().step(data.text)
        self._num_steps += 1
        return self._observation(observation, float(reward), terminated, truncated, info)

    def _state(self, _: Any) -> Reply:
        return "state", {**self._names, "step_count": self._num_steps}

    def _reference_actions(self, _: Any) -> Reply:
        if not self._with_reference:
            text = "The server does not offer its solutions; start it with --reference."
            raise Refusal(ErrorCode.NOT_OFFERED, text, "NotImplementedError")
        env: Any = self._begun().unwrapped
        return "reference_actions", {"actions": list(env.reference_actions())}

    def _begun(self) -> TextEnv:
        if self._env is None:
            raise gym.error.ResetNeeded("No episode has begun in this session; send a reset first.")
        return self._env

    def _observation(
        self, text: str, reward: float | None, terminated: bool, truncated: bool,
        info: Mapping[str, Any],
    ) -> Reply:  # fmt: skip
        base: Any = self._begun().unwrapped
        self.is_over = bool(terminated or truncated)
        self._names["task_id"] = info.get("task_id")
        observation = {
            "text": text,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": info,
            "metrics": base.metrics(),
            "task_index": base.task_index,
            "generator": base.np_random.bit_generator.state,
        }
        return "observation", {"observation": observation, "reward": reward, "done": self.is_over}


def describe(env: TextEnv, *, with_reference: bool) -> dict[str, Any]:
    """Return the description of a served environment for its clients."""
    base: Any = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(
            f"{type(base).__name__} is not an environment with tools (a ToolEnv), so its clients "
            "would not know the format of its actions."
        )
    # Without paths, which differ between machines with the same data.
    kwargs = dict(env.spec.kwargs) if env.spec else {}
    arguments = {name: value for name, value in kwargs.items() if "/" not in str(value)}
    described = {
        "environment": env.spec.id if env.spec else type(base).__name__,
        "max_episode_steps": env.spec.max_episode_steps if env.spec else None,
        "tool_format": base.tool_format,
        "is_dialogue": type(base).on_message is not ToolEnv.on_message,
        "tools": [tool.schema for tool in base.tools.values()],
        "num_tasks": base.num_tasks,
        "reward_weights": dict(base.reward_weights),
        "outcome_terms": sorted(base.outcome_terms),
        "with_reference": with_reference,
    }
    text = json.dumps([described, arguments], sort_keys=True, default=lambda v: type(v).__name__)
    return described | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}
