"""`RemoteEnv`: an environment that runs on another machine."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import gymnasium as gym

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.tasks import Task
from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ServerError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.remote.client import Client, SessionLost
from agent_envs.remote.protocol import KNOWN_ERRORS, Refusal

MAX_ATTEMPTS: Final = 4
"""Sessions in which a message is tried; each of them ended before its reply."""


class RemoteEnv(ToolEnv):
    """An environment that runs on one of several servers, as if it were local.

    ``python -m agent_envs serve ID`` starts a server. Observations, rewards, infos, turn limits,
    seeds and options are those of the environment there, whose arguments are given where it is
    started. Sessions are opened on the servers in turn. If one ends (the server dies, restarts, or
    drops an idle session), the episode is resumed in another by replaying its actions.
    """

    not_in_snapshots: ClassVar[frozenset[str]] = frozenset(
        {"description", "_client", "outcome_terms"}
    )

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        connect_timeout: float = 60.0,
        timeout: float = 300.0,
        render_mode: str | None = None,
    ) -> None:
        """Open a session and get the server's description of the environment.

        Args:
            url: The server's URL, ``http://host:8000``; or several, of servers of the same.
            connect_timeout: Seconds to wait for a server with a free session, before an episode
                fails.
            timeout: Seconds to wait for an answer.
            render_mode: See `ToolEnv`.
        """
        require_extra("serve", "AgentR1/Remote-v0", "websockets")
        self._client = Client(url, connect_timeout=connect_timeout, timeout=timeout)
        weakref.finalize(self, self._client.close).atexit = False
        described = self.description = self._client.description
        self.outcome_terms = frozenset(described["outcome_terms"])  # type: ignore[misc]
        self._reset_data: dict[str, Any] | None = None  # of the episode
        self._last: dict[str, Any] = {}  # observation, with all that the server adds
        self._actions: list[str] = []
        self._outcomes: list[tuple[str, float | None]] = []  # observations and rewards
        self._schemas: list[Any] = described["tools"]
        tool_format = lookup(TOOL_FORMATS, described["tool_format"], kind="tool format")
        super().__init__(
            default_tools=_tools(self._schemas),
            tool_format=tool_format.for_dialogue() if described["is_dialogue"] else tool_format,
            render_mode=render_mode,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; see `ToolEnv.reset`."""
        gym.Env.reset(self, seed=seed)
        self._find_turn_limit("reset")
        if seed is None and not self._last:
            seed = int(self.np_random.integers(2**31))
        generator = self._last["generator"] if seed is None else None
        data = {
            "seed": seed, "generator": generator, "options": options, "turn_limit": self.max_turns
        }  # fmt: skip
        reply = self._request("reset", **data)
        self._reset_data, self._actions, self._outcomes = data, [], []
        self._is_over, self.num_turns = False, 0
        observation, info = self._record(reply)
        self.task_index = self._last["task_index"]
        self._task = Task(id=str(info.get("task_id")), question=observation, answers=())
        if render_mode := self.render_mode:
            self._transcript.begin(render_mode, observation)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn; see `ToolEnv.step`."""
        self._open_turn(action)
        reply = self._request("step", text=action)
        self.num_turns += 1
        self._actions.append(action)
        observation, info = self._record(reply)
        terminated, truncated = self._last["terminated"], self._last["truncated"]
        self._is_over = terminated
        if render_mode := self.render_mode:
            is_last = terminated or truncated
            self._transcript.add_step(render_mode, action, observation, info, is_last=is_last)
        return observation, reply["reward"], terminated, truncated, info

    def reference_actions(self) -> list[str]:
        """Return actions that solve the current task, if the server offers them."""
        return list(self._request("reference_actions")["actions"])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the episode as if it ended now."""
        return dict(self._last["metrics"])

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks; None where they are endless."""
        return self.description["num_tasks"]  # type: ignore[no-any-return]

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of each reward term that is on."""
        return self.description["reward_weights"]  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _request(self, kind: str, **data: Any) -> dict[str, Any]:
        """Send a message, in a session that is in the state of the episode unless it is a reset."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._client.open()
                if kind != "reset" and not self._client.is_current:
                    self._resume_episode()
                reply = self._client.request(kind, **data)
            except SessionLost as error:
                if attempt == MAX_ATTEMPTS:
                    text = f"{attempt} sessions ended during a {kind}; the last one: {error}."
                    raise ServerError(f"{text} See the logs of the servers.") from error
            except Refusal as refusal:
                self._client.is_current = False
                raise KNOWN_ERRORS.get(refusal.kind or "", ServerError)(str(refusal)) from None
            else:
                self._client.is_current = True
                return reply
        raise AssertionError("unreachable")

    def _resume_episode(self) -> None:
        """Replay the episode in a new session."""
        if self._reset_data is None:
            return
        reply = self._client.request("reset", **self._reset_data | {"turn_limit": self.max_turns})
        for number, recorded in enumerate(self._outcomes):
            if number > 0:
                reply = self._client.request("step", text=self._actions[number - 1])
            found = reply["observation"]["text"], reply["reward"]
            if found != recorded:
                raise ServerError(
                    "The episode cannot be resumed in another session: after "
                    f"{number} of {len(self._actions)} actions, observation and reward are "
                    f"{found!r:.300}, and were {recorded!r:.300}."
                )

    def _record(self, reply: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Record a reply from which the episode may be resumed; return observation and info."""
        observed = self._last = reply["observation"]
        self._outcomes.append((observed["text"], reply["reward"]))
        info: dict[str, Any] = observed["info"]
        schemas = info.get("tools", self._schemas)
        if schemas != self._schemas:  # the episode has its own tools
            self._schemas = schemas
            self.offer_tools(_tools(schemas))
        return observed["text"], info

    def _has_state_elsewhere(self) -> bool:
        return False  # the server's state is replayed

    def _resume(self, *, is_replayed: bool) -> None:
        super()._resume(is_replayed=is_replayed)
        self._client.is_current = False
        self.offer_tools(_tools(self._schemas))

    @property
    def _identity(self) -> str:
        """Name of the served environment, wherever it is served, and its arguments."""
        return f"{self.description['environment']} {self.description['fingerprint']}"


def _tools(schemas: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools of the server."""
    return [SchemaTool(**schema["function"]) for schema in schemas]
