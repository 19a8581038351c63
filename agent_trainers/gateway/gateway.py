"""`Gateway`: OpenAI's API on loopback, served by a policy."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Self

from agent_envs.core.lookup import require_extra
from agent_trainers.gateway.connections import ConnectionLimit, default_limit, limited_protocol
from agent_trainers.gateway.generation_loop import IDLE_SECONDS, GenerationLoop
from agent_trainers.gateway.session import Session, SessionClosedError, SessionLimits
from agent_trainers.policies.policy import Policy

_STOP_SECONDS: Final = 2
_HOST: Final = "127.0.0.1"
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}


class Gateway:
    """A server of OpenAI's API that samples from a policy and records each session as an episode.

    ::

        with Gateway(policy) as gateway:
            session = gateway.open(task_id="17", group_id="g3", seed=7)
            client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
            ...                                     # the program's own loop, framework and tools
            trajectory = session.close(reward=1.0)

    Calls of all sessions share one stream of the policy, as the episodes of a rollout do. Any
    thread may open and close sessions.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        limits: SessionLimits | None = None,
        ignored_parameters: Collection[str] = (),
        in_thread: bool = True,
        max_connections: int | None = None,
    ) -> None:
        """Prepare to serve `policy`; the server starts with ``with``.

        Args:
            policy: Samples the turns.
            limits: Limits of one session.
            ignored_parameters: Parameters of requests that are ignored. All others are honoured or
                refused by name.
            in_thread: Whether the policy generates in a thread of the gateway, with constant
                weights. False: it generates in the thread that calls `generate`, as a trainer does
                between two steps.
            max_connections: Open connections; beyond them, the session with the most loses one.
                None for half of the process's file descriptors, at most 4,096.
        """
        require_extra("serve", "The gateway", "starlette", "uvicorn")
        self.policy = policy
        self.shows_tools = policy.shows_tools([_PROBE_TOOL])
        """Whether the chat template describes tools; else the system prompt does."""
        self._limits = limits or SessionLimits()
        self.ignored_parameters = frozenset(ignored_parameters)
        self._in_thread = in_thread
        self.connections = ConnectionLimit(
            default_limit() if max_connections is None else max_connections
        )
        self.address = ""
        """The URL of the server."""
        self.sessions: dict[str, Session] = {}
        """The open sessions, by the id in their URL."""
        self._numbers, self.keys = itertools.count(), itertools.count()
        self.loop = GenerationLoop(policy, lambda: len(self.sessions))
        self._server: Any = None
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    def __enter__(self) -> Self:
        import uvicorn

        from agent_trainers.gateway.application import Application

        # asyncio accepts all waiting connections at once, before an evicted one is closed
        backlog = default_limit() // 8
        config = uvicorn.Config(
            Application(self).asgi(),
            access_log=False,
            backlog=backlog,
            http=limited_protocol(self.connections),
            lifespan="off",
            log_config=None,
            log_level="warning",
            proxy_headers=False,  # clients must not choose their address
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
            timeout_keep_alive=60,
            ws="none",
        )
        listening = socket.create_server((_HOST, 0), backlog=backlog)
        self.address = f"http://{_HOST}:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._start("gateway-server", lambda: self._server.run(sockets=[listening]))
        if self._in_thread:
            self._start("gateway-policy", self._generate_until_closed)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving and refuse running calls."""
        self._is_closing = True
        self._server.should_exit = True
        for thread in self._threads[1:]:
            thread.join()
        self.loop.refuse_all(SessionClosedError("the gateway is closed"))
        self._threads[0].join()

    def open(
        self,
        *,
        task_id: str,
        group_id: str | None = None,
        seed: int | Sequence[int] = 0,
        limits: SessionLimits | None = None,
    ) -> Session:
        """Open a session, which is one episode.

        Args:
            task_id: The program's task.
            group_id: Episodes with the same id are compared with each other; `task_id` if None.
            seed: Seed of its sampling, as for ``np.random.default_rng``; a different one for each
                member of a group.
            limits: Its limits; the gateway's if None.
        """
        if self._server is None or self._is_closing:
            raise SessionClosedError("The gateway is not open: open sessions inside its `with`.")
        session = Session(
            self,
            number=next(self._numbers),
            task_id=task_id,
            group_id=task_id if group_id is None else group_id,
            seed=seed,
            limits=limits or self._limits,
        )
        self.sessions[session.id] = session
        return session

    def generate(
        self, is_active: Callable[[], bool], is_any_active: Callable[[bool], bool] = bool
    ) -> None:
        """Generate for the sessions in this thread, while `is_active`.

        For ``in_thread=False``: the policy's stream, and with it a trainer's model, is in use until
        this returns. `is_any_active` as in `Rollout`, where generation is collective.
        """
        self.loop.run(is_active, is_any_active)

    def _start(self, name: str, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _generate_until_closed(self) -> None:
        while not self._is_closing:
            try:
                self.loop.run(lambda: not self._is_closing)
            except Exception as error:  # noqa: BLE001 - foreign code; its callers get the error
                self.loop.refuse_all(error)
                time.sleep(IDLE_SECONDS)
