"""`RemoteEnv`: an environment that runs on another machine."""

import copy
import itertools
import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

import gymnasium as gym
import pydantic

from agent_envs.core.command_line import refusal
from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.tasks import Task
from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.remote.protocol import (
    KNOWN_ERRORS,
    MAX_MESSAGE_BYTES,
    MAX_REPLY_BYTES,
    TOKEN_VARIABLE,
    Description,
    Refusal,
    write_message,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_ATTEMPTS: Final = 4
"""Sessions in which a message is tried; each of them ended before its reply."""
OPEN_SECONDS: Final = 10.0
"""Time limit for a server to open a session and to describe its environment."""
PAUSE_SECONDS: Final = 0.2
_num_opened = itertools.count()


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
        self._client = _Client(url, connect_timeout, timeout)
        weakref.finalize(self, self._client.close).atexit = False
        described = self.description = self._client.description
        self.outcome_terms = frozenset(described["outcome_terms"])  # type: ignore[misc]
        self._last: dict[str, Any] = {}  # observation, with all that the server adds
        self._messages: list[tuple[str, dict[str, Any]]] = []  # reset and steps of the episode
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
        gym.Env.reset(self, seed=seed)
        self._find_turn_limit("reset")
        if seed is None and not self._last:
            seed = int(self.np_random.integers(2**31))
        generator = self._last["generator"] if seed is None else None
        data = {
            "seed": seed, "generator": generator, "options": options, "turn_limit": self.max_turns
        }  # fmt: skip
        reply = self._request("reset", data)
        self._messages, self._outcomes = [], []
        self._is_over, self.num_turns = False, 0
        observation, info = self._record("reset", data, reply)
        self.task_index = self._last["task_index"]
        self._task = Task(id=str(info.get("task_id")), question=observation, answers=())
        if render_mode := self.render_mode:
            self._transcript.begin(render_mode, observation)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._open_turn(action)
        reply = self._request("step", {"text": action})
        self.num_turns += 1
        observation, info = self._record("step", {"text": action}, reply)
        terminated, truncated = self._last["terminated"], self._last["truncated"]
        self._is_over = terminated
        if render_mode := self.render_mode:
            is_last = terminated or truncated
            self._transcript.add_step(render_mode, action, observation, info, is_last=is_last)
        return observation, reply["reward"], terminated, truncated, info

    def reference_actions(self) -> list[str]:
        """Return actions that solve the current task, if the server offers them."""
        return list(self._request("reference_actions", {})["actions"])

    def metrics(self) -> dict[str, float]:
        return dict(self._last["metrics"])

    @property
    def state(self) -> dict[str, Any]:
        """The `info` of the last reply."""
        info: dict[str, Any] = copy.deepcopy(self._last["info"])
        return info

    @property
    def num_tasks(self) -> int | None:
        return self.description["num_tasks"]  # type: ignore[no-any-return]

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.description["reward_weights"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self._client.close()

    def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message, in a session that is in the state of the episode unless it is a reset."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._client.open()
                if kind != "reset" and not self._client.is_current:
                    self._resume_episode()
                reply = self._client.request(kind, data)
            except _SessionLostError as error:
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
        for number, (kind, data) in enumerate(self._messages):
            limit = {"turn_limit": self.max_turns} if kind == "reset" else {}
            reply = self._client.request(kind, data | limit)
            found = reply["observation"]["text"], reply["reward"]
            if found != (recorded := self._outcomes[number]):
                raise ServerError(
                    f"The episode cannot be resumed in another session: after {number} actions, "
                    f"observation and reward are {found!r:.300}, and were {recorded!r:.300}."
                )

    def _record(
        self, kind: str, data: dict[str, Any], reply: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Record a message for `_resume_episode`; return observation and info of its reply."""
        observed = self._last = reply["observation"]
        self._messages.append((kind, data))
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


class _SessionLostError(ConnectionError):
    """The connection of a session ended, and with it the session."""


class _Client:
    """One session on one of several servers of the same environment."""

    def __init__(self, urls: str | Sequence[str], connect_timeout: float, timeout: float) -> None:
        """Open a session; check that the servers that answer serve the same."""
        self._servers = list(map(_parse, [urls] if isinstance(urls, str) else urls))
        if not self._servers:
            raise ConfigurationError("url: name at least one server, http://host:8000.")
        self.connect_timeout, self.timeout = connect_timeout, timeout
        self.description: dict[str, Any] = {}
        self.is_current = False
        """Whether the session is in the state of the client's episode; set by its owner."""
        self._connection: ClientConnection | None = None
        self._process = os.getpid()
        for server in self._servers if len(self._servers) > 1 else ():
            try:
                self._open_on(server)
            except OSError:
                continue  # compared when it is used
            self.close()
        self.open()

    def open(self) -> None:
        """Open a session, unless this process has one; the servers take turns."""
        if self._connection is not None and self._process == os.getpid():
            return
        self.close()
        deadline, num_servers = time.monotonic() + self.connect_timeout, len(self._servers)
        first = os.getpid() + next(_num_opened)  # processes begin at different servers
        for number in itertools.count(first):
            try:
                return self._open_on(self._servers[number % num_servers])
            except OSError as error:
                if number - first >= num_servers - 1 and time.monotonic() > deadline:
                    raise ServerError(
                        f"No server accepted the session within {self.connect_timeout:g} seconds: "
                        f"{error}. Start one with python -m agent_envs serve ID, or raise "
                        "connect_timeout=."
                    ) from error
            time.sleep(PAUSE_SECONDS / num_servers)

    def request(
        self, kind: str, data: dict[str, Any], timeout: float | None = None
    ) -> dict[str, Any]:
        """Send a message and return the data of the reply."""
        from websockets.exceptions import ConnectionClosed

        assert self._connection is not None  # noqa: S101 - open() was called
        text = write_message(kind, data)
        if len(text) > MAX_MESSAGE_BYTES:
            limit = f"the limit is {MAX_MESSAGE_BYTES:,}"
            raise ServerError(f"The {kind} message has {len(text):,} bytes; {limit}.")
        seconds = timeout or self.timeout
        try:
            self._connection.send(text)
            reply = json.loads(self._connection.recv(timeout=seconds))
            answer: dict[str, Any] = reply["data"]
            if reply["type"] != "error":
                return answer
            refusal = Refusal(answer["code"], answer["message"], answer.get("kind"))
        except TimeoutError:
            self.close()
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None
        except (ConnectionClosed, OSError) as error:
            self.close()
            raise _SessionLostError(str(error)) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise ServerError("The server sent a malformed reply.") from error
        raise refusal

    def close(self) -> None:
        """End the session, unless it belongs to the process that this one was forked from."""
        connection, self._connection, self.is_current = self._connection, None, False
        if connection is not None and self._process == os.getpid():
            connection.close()

    def _open_on(self, url: str) -> None:
        """Open a session on a server; raise an OSError if that fails."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        token = os.environ.get(TOKEN_VARIABLE)
        try:
            self._connection = connect(
                f"{url.replace('http', 'ws', 1)}/ws",
                additional_headers={"Authorization": f"Bearer {token}"} if token else {},
                open_timeout=OPEN_SECONDS, close_timeout=1.0, max_size=MAX_REPLY_BYTES,
                compression=None, proxy=None,
            ).__enter__()  # fmt: skip
            self._process = os.getpid()
            description = _read_description(url, self.request("describe", {}, OPEN_SECONDS))
        except InvalidStatus as error:
            if error.response.status_code == 401:
                text = f"{url} requires a token: set {TOKEN_VARIABLE} to that of the server."
                raise ConfigurationError(text) from None
            is_full = error.response.status_code == 503
            reason = "all its sessions are in use (--max_sessions)" if is_full else error
            raise OSError(f"{url}: {reason}") from error
        except (WebSocketException, OSError, ServerError, Refusal) as error:
            self.close()
            raise OSError(f"{url}: {error}") from error
        self.description = self.description or description
        if description["fingerprint"] != self.description["fingerprint"]:
            self.close()
            raise ConfigurationError(
                f"url: {url} serves another environment, or other arguments or data, than the "
                "other servers. Start all servers of one list with the same."
            )


def _read_description(url: str, reply: dict[str, Any]) -> dict[str, Any]:
    try:
        return Description.model_validate(reply).model_dump()
    except pydantic.ValidationError as error:
        problem = refusal(f"{url}: the description of the environment", error)
        raise ConfigurationError(f"{problem} Start it with python -m agent_envs serve.") from None


def _parse(url: str) -> str:
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        shown = url.rpartition("@")[2]  # without a secret
        raise ConfigurationError(f"url: {shown!r} is not the URL of a server: http://host:8000.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
