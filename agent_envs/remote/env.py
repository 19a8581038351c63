"""`RemoteEnv`: an environment that is played on another machine."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import gymnasium as gym

from agent_envs.core.extras import require_extra
from agent_envs.core.lookup import lookup
from agent_envs.core.messages import StateMessages, ToolSchemas
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolResult
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ServerError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.remote.journal import Journal, digest
from agent_envs.remote.link import Link, SessionLost
from agent_envs.remote.protocol import RAISED_AGAIN, ErrorCode, Refusal

MAX_ATTEMPTS: Final = 4
"""How often a message is sent, to one server after the other, each of which ended the session."""


class RemoteTool(Tool):
    """What a server says of a tool; it runs there, when an action calls it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Know the schema, in the OpenAI format."""
        function = schema["function"]
        self.name: str = function["name"]
        self.description: str = function["description"]
        self.parameters: dict[str, Any] = function["parameters"]
        self.timeout, self.max_result_chars, self.stateful = None, 0, True
        self.function = self._run_elsewhere

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are; the server looks at them."""
        return dict(arguments)

    def __call__(self, **arguments: Any) -> ToolResult:
        """Refuse.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"{self.name!r} runs on the server: env.step(write_call(...)).")

    def _run_elsewhere(self, **arguments: Any) -> ToolResult:
        return self(**arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the schema."""
        return RemoteTool, (self.schema,)

    def __repr__(self) -> str:
        """Show name and arguments."""
        return f"RemoteTool({self.name}({', '.join(self.parameters.get('properties', {}))}))"


class RemoteEnv(ToolEnv):
    """Plays what servers serve, as if it were here.

    ``python -m agent_envs.serve ID`` starts a server. Observations, rewards, infos, turn limits,
    seeds and options are those of the environment there, whose arguments are given where it is
    started. A session is opened on the server with the fewest. Where one ends (a server dies, is
    restarted, or forgets a session that was idle), the episode goes on in another: from the last
    snapshot, which the server sealed, or else by playing its actions again.
    """

    not_in_snapshots: ClassVar[frozenset[str]] = frozenset({"described", "_link", "outcome_terms"})

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        patience: float = 60.0,
        timeout: float = 300.0,
        render_mode: str | None = None,
    ) -> None:
        """Ask a server what it serves.

        Args:
            url: Where it is, ``http://host:8000``; or several, which serve the same.
            patience: Seconds to look for a server that is there, before an episode fails.
            timeout: Seconds a server may take for one answer, or to have room.
            render_mode: See `ToolEnv`.

        Raises:
            ServerError: If no server answers.
            ConfigurationError: If a URL is none, or a server wants another token.
            MissingExtraError: If `websockets` is not installed.
        """
        require_extra("serve", "AgentR1/Remote-v0", "websockets")
        self._link = Link(url, patience=patience, timeout=timeout)
        weakref.finalize(self, self._link.close).atexit = False
        self.described = self._link.describe()
        self._link.fingerprint = self.described["fingerprint"]
        self.outcome_terms = frozenset(self.described["outcome_terms"])  # type: ignore[misc]
        self._journal: Journal | None = None
        self._metrics: dict[str, float] = {}
        self._schemas: list[Any] = self.described["tools"]
        tool_format = lookup(TOOL_FORMATS, self.described["tool_format"], kind="tool format")
        super().__init__(
            default_tools=[RemoteTool(schema) for schema in self._schemas],
            tool_format=tool_format.for_dialogue()
            if self.described["is_dialogue"]
            else tool_format,
            render_mode=render_mode,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; see `ToolEnv.reset`.

        Raises:
            ServerError: If no server takes it.
            TimeoutError: If one takes too long.
            Exception: What the environment raised.
        """
        gym.Env.reset(self, seed=seed)
        self._turn_limit.find(self)
        self.max_turns = self._turn_limit.turns
        if seed is None and self._journal is None:
            seed = int(self.np_random.integers(2**31))  # so that the episode can be played again
        data = {
            "seed": seed, "options": options, "turn_limit": self.max_turns, "with_snapshots": True
        }  # fmt: skip
        message = {"type": "reset", "data": data}
        reply = self._ask(message, goes_on=seed is None)
        if seed is not None or self._journal is None:
            self._journal = Journal(message)
        else:
            self._journal = self._journal.followed_by(message, self.max_turns)
        self._is_over, self.num_turns = False, 0
        observation, info = self._take(message, reply)
        self.task_index = reply["observation"]["task_index"]
        self._task = Task(id=str(info.get("task_id")), question=observation, answers=())
        self._transcript.begin(self.render_mode, observation)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn; see `ToolEnv.step`.

        Raises:
            ResetNeeded: If the episode is over or none has begun.
            ActionTypeError: If `action` is not a string.
            ServerError: If no server takes it.
            TimeoutError: If one takes too long.
            Exception: What the environment raised.
        """
        self._open_turn(action)
        message = {"type": "step", "data": {"text": action}}
        reply = self._ask(message)
        self.num_turns += 1
        observation, info = self._take(message, reply)
        terminated, truncated = (reply["observation"][k] for k in ("terminated", "truncated"))
        self._is_over = terminated
        if {"reward_terms", "action", "metrics"} <= info.keys():
            is_last = terminated or truncated
            self._transcript.add_step(self.render_mode, action, observation, info, is_last=is_last)
        return observation, reply["reward"], terminated, truncated, info

    def reference_actions(self) -> list[str]:
        """Return actions that solve the current task, if the server lets them be known."""
        actions: list[str] = self._ask({"type": "reference_actions"})["actions"]
        return actions

    def metrics(self) -> dict[str, float]:
        """Measure the episode as if it ended now."""
        return dict(self._metrics)

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None where they are endless."""
        number: int | None = self.described["num_tasks"]
        return number

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of each reward term that is on."""
        weights: Mapping[str, float] = self.described["reward_weights"]
        return weights

    @property
    def num_sessions(self) -> int:
        """How many sessions have been opened: more than one where servers ended some."""
        return self._link.num_opened

    @property
    def is_immediate(self) -> bool:
        """Whether a step returns at once: no, it waits for the server."""
        return False

    def close(self) -> None:
        """End the session."""
        self._link.close()

    # Insides

    def _ask(self, message: dict[str, Any], *, goes_on: bool = True) -> dict[str, Any]:
        """Send a message in a session that is where the episode is; unless it need not go on."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                if not self._link.is_open:
                    self._link.open()
                if goes_on and not self._link.is_current and self._journal is not None:
                    self._resume_episode(self._journal)
                reply = self._link.ask(message)
            except SessionLost as error:
                if attempt == MAX_ATTEMPTS:
                    raise ServerError(
                        f"{attempt} sessions ended while a {message['type']} was carried out; the "
                        f"last one: {error}. The servers' logs may say why."
                    ) from error
            except Refusal as refusal:
                self._link.is_current = False
                raise _as_error(refusal) from None
            else:
                self._link.is_current = True
                return reply
        raise AssertionError("unreachable")

    def _resume_episode(self, journal: Journal) -> None:
        """Bring a session to where the episode is.

        Raises:
            ServerError: If it came somewhere else.
        """
        for messages in journal.ways_back(self.max_turns):
            try:
                replies = [self._link.ask(message) for message in messages]
            except Refusal as refusal:
                if refusal.code != ErrorCode.SNAPSHOT_REFUSED:
                    raise
                reason = str(refusal)
                continue
            last = replies[-1]
            if "observation" in last and digest(last) != journal.last_seen:
                raise ServerError(
                    "The episode cannot go on in another session: its actions, played again, gave "
                    "something else than before."
                )
            self._link.is_current = True
            return
        raise ServerError(f"The episode cannot go on in another session: {reason}")

    def _take(
        self, message: dict[str, Any], reply: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Note what came of a message; return the observation and its info."""
        assert self._journal is not None  # noqa: S101 - reset made it
        said = reply["observation"]
        self._journal.note(message, reply)
        info: dict[str, Any] = said["info"]
        self._metrics = said["metrics"]
        schemas = info.get("tools", self._schemas)
        if schemas != self._schemas:  # an episode with tools of its own
            self._schemas = schemas
            self.offer_tools([RemoteTool(schema) for schema in schemas])
        if "tools" in info:
            info["tools"] = ToolSchemas(schemas)
        if "messages" in info:
            info["messages"] = StateMessages(info["messages"])
        return said["text"], info

    def _callables_with_state(self) -> Mapping[str, Any]:
        return {}

    def _resume(self, *, is_restored: bool) -> None:
        super()._resume(is_restored=is_restored)
        self._link.is_current = False
        self.offer_tools([RemoteTool(schema) for schema in self._schemas])

    @property
    def _description(self) -> tuple[str, dict[str, str]]:
        """Name the environment that is served, wherever that is."""
        names = ("environment", "fingerprint")
        return "AgentR1/Remote-v0", {name: self.described[name] for name in names}


def _as_error(refusal: Refusal) -> Exception:
    """Return the error that a server's environment raised, or one that says why it did not play."""
    kind: Callable[[str], Exception] = RAISED_AGAIN.get(refusal.kind or "", ServerError)
    return kind(str(refusal))
