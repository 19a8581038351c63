"""One client's session: an environment of its own, and what came of the client's messages."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from agent_envs.core.async_bridge import Worker
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError, SnapshotError
from agent_envs.remote.protocol import (
    CALLERS_MISTAKES,
    RAISED_AGAIN,
    ErrorCode,
    Refusal,
    Reset,
    Restore,
    Step,
    read_message,
    write_refusal,
    write_reply,
)
from agent_envs.remote.seal import Seal
from agent_envs.wrappers.awaited import awaited

TextEnv = gym.Env[str, str]
_log = logging.getLogger(__name__)


class Session:
    """Plays one environment for one client, in a thread of its own.

    All of it but `thread` and `is_over` belongs to that thread: messages are read, carried out and
    answered there, so that a client's long or slow ones keep no other waiting.
    """

    def __init__(
        self, make_env: Callable[[], TextEnv], seal: Seal, *, with_reference: bool
    ) -> None:
        """Begin without an environment; the first message that needs one makes it.

        Args:
            make_env: Makes the environment.
            seal: Closes and opens snapshots.
            with_reference: Whether a client may ask for the actions that solve a task.
        """
        self.thread = Worker()
        self.is_over = False
        """Whether the episode has ended; of interest where a session lasts for one."""
        self._make_env, self._seal, self._with_reference = make_env, seal, with_reference
        self._made: TextEnv | None = None
        self._env: TextEnv | None = None
        self._num_steps = 0
        self._names: dict[str, str | None] = {"episode_id": None, "task_id": None}
        self._with_snapshots = False
        self._actions: dict[str, Callable[[Any], tuple[str, dict[str, Any]]]] = {
            "reset": self._reset, "step": self._step, "state": self._state,
            "restore": self._restore, "reference_actions": self._reference_actions,
        }  # fmt: skip

    def handle(self, text: str) -> str | None:
        """Carry a message out and return the reply; None where the client says it is done."""
        try:
            kind, data = read_message(text)
            return None if kind == "close" else self._carry_out(kind, data)
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

    def _carry_out(self, kind: str, data: Any) -> str:
        try:
            return write_reply(*self._actions[kind](data))
        except Refusal:
            raise
        except CALLERS_MISTAKES as error:
            name = type(error).__name__
            raise Refusal(ErrorCode.EXECUTION_ERROR, str(error), name) from error
        except (Exception, SystemExit) as error:
            # Foreign code failed, and may have left anything behind: the next episode begins anew.
            _log.warning("An environment failed at a %s message.", kind, exc_info=True)
            self.close()
            name, is_known = type(error).__name__, type(error).__name__ in RAISED_AGAIN
            text = str(error) if is_known else f"{name}; the server's log says more."
            raise Refusal(ErrorCode.EXECUTION_ERROR, text, name) from error

    def _reset(self, data: Reset) -> tuple[str, dict[str, Any]]:
        env = self._limit(data.turn_limit)
        observation, info = env.reset(seed=data.seed, options=data.options)
        self._num_steps, self._with_snapshots = 0, data.with_snapshots
        self._names["episode_id"] = data.episode_id
        return self._observation(observation, None, False, False, info)

    def _step(self, data: Step) -> tuple[str, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._begun().step(data.text)
        self._num_steps += 1
        return self._observation(observation, float(reward), terminated, truncated, info)

    def _state(self, _: Any) -> tuple[str, dict[str, Any]]:
        return "state", {**self._names, "step_count": self._num_steps}

    def _restore(self, data: Restore) -> tuple[str, dict[str, Any]]:
        saved = self._seal.open(data.snapshot)
        env = self._limit(data.turn_limit)
        base: Any = env.unwrapped
        if self._num_steps == 0 and base.spec is not None and base.spec.order_enforce:
            env.reset(seed=0)  # Gymnasium's order wrapper asks for it
        try:
            base.restore(saved["snapshot"])
        except (Exception, SystemExit) as error:
            self.close()  # half of it may have been restored
            is_known = isinstance(error, SnapshotError)
            text = str(error) if is_known else f"Restoring failed with a {type(error).__name__}."
            raise Refusal(ErrorCode.SNAPSHOT_REFUSED, text) from error
        self._num_steps, self._names = saved["num_steps"], dict(saved["names"])
        self._with_snapshots = True
        return "restored", {}

    def _reference_actions(self, _: Any) -> tuple[str, dict[str, Any]]:
        if not self._with_reference:
            text = "The server keeps its solutions to itself; start it with --reference."
            raise Refusal(ErrorCode.NOT_OFFERED, text, "NotImplementedError")
        env: Any = self._begun().unwrapped
        return "reference_actions", {"actions": list(env.reference_actions())}

    def _begun(self) -> TextEnv:
        if self._env is None:
            raise gym.error.ResetNeeded("No episode has begun in this session; send a reset first.")
        return self._env

    def _limit(self, turns: int | None) -> TextEnv:
        """Return the environment, made if there is none, with a client's own limit of turns."""
        if self._made is None:
            try:
                self._made = awaited(self._make_env())
            except (Exception, SystemExit) as error:
                _log.warning("The environment could not be made.", exc_info=True)
                text = f"The environment could not be made ({type(error).__name__})."
                raise Refusal(ErrorCode.FACTORY_ERROR, text) from error
        self._env = self._made if turns is None else TimeLimit(self._made, turns)
        return self._env

    def _observation(
        self, text: str, reward: float | None, terminated: bool, truncated: bool,
        info: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        base: Any = self._begun().unwrapped
        self.is_over = bool(terminated or truncated)
        self._names["task_id"] = info.get("task_id")
        observation = {
            "text": text,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": info,
            "metrics": base.metrics() if hasattr(base, "metrics") else info.get("metrics", {}),
            "task_index": getattr(base, "task_index", None),
        }
        if self._with_snapshots:
            observation["snapshot"] = self._sealed(base)
        return "observation", {"observation": observation, "reward": reward, "done": self.is_over}

    def _sealed(self, base: Any) -> str | None:
        """Return a snapshot that only servers can read; None where the state cannot be saved."""
        try:
            snapshot = base.snapshot()
        except (SnapshotError, AttributeError):
            return None
        saved = {"snapshot": snapshot, "num_steps": self._num_steps, "names": self._names}
        return self._seal.close(saved)


def describe(env: TextEnv, *, with_reference: bool) -> dict[str, Any]:
    """Return what clients have to know of the environment that a server plays.

    Raises:
        ConfigurationError: If a client could not write its actions.
    """
    base: Any = env.unwrapped
    if not isinstance(base, ToolEnv):
        raise ConfigurationError(
            f"{type(base).__name__} is no environment with tools (a ToolEnv), so its actions have "
            "no format that a client could know."
        )
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
    text = json.dumps(described, sort_keys=True)
    return described | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}
