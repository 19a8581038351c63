"""`Gateway`: OpenAI's and Anthropic's APIs on loopback, served by a policy."""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self

from agent_envs.core.lookup import require_extra
from agent_trainers.gateway.requests import ApiError
from agent_trainers.gateway.session import Session, SessionClosedError, SessionLimits
from agent_trainers.policies.policy import Generation, GenerationRequest, GenerationStream, Policy
from agent_trainers.trajectory import StopReason

IDLE_SECONDS: Final = 0.05
GATHER_SECONDS: Final = 0.02
"""How long a wave waits for more calls, as in a rollout."""
_HOST: Final = "127.0.0.1"
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}
_CLOSED: Final = ApiError(403, "The session was closed.")

_log = logging.getLogger(__name__)
_Call = tuple[GenerationRequest, Future[Generation]]


class Gateway:
    """An API of a policy, which records each session as an episode; see `dialects`.

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
        self._in_thread, self._max_connections = in_thread, max_connections
        self.address = ""
        """The URL of the server."""
        self.sessions: dict[str, Session] = {}
        """The open sessions, by the id in their URL."""
        self._numbers, self.keys = itertools.count(), itertools.count()
        # A stream belongs to one thread: calls and cancellations wait for it here.
        self._queue: queue.SimpleQueue[tuple[int, _Call | None]] = queue.SimpleQueue()
        self._running: dict[int, _Call] = {}
        self._server: Any = None
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    def __enter__(self) -> Self:
        from agent_envs.remote.http_server import listen
        from agent_trainers.gateway.application import make_application

        self._server, listening, self.address = listen(
            make_application(self), _HOST, max_connections=self._max_connections, ws="none"
        )
        self._start("gateway-server", lambda: self._server.run(sockets=[listening]))
        if self._in_thread:
            self._start("gateway-policy", self._generate_until_closed)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving and refuse running calls."""
        self._is_closing = True
        for thread in self._threads[1:]:
            thread.join()
        self._server.should_exit = True  # cancels calls that have no reply soon
        self._refuse_all(SessionClosedError("the gateway is closed"))
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
        this returns. Unfinished calls start again in the next call. `is_any_active` as in
        `Rollout`, where generation is collective.
        """
        stream = self.policy.open_stream()
        try:
            for key, (request, _) in self._running.items():
                stream.add(key, request)
            while is_any_active(is_active()):
                is_busy = is_any_active(stream.has_requests)
                self._take_calls(stream, is_busy=is_busy)
                if is_busy:
                    for key, result in stream.advance():
                        stream.mark_idle(key)  # its program may never call again
                        self._finish(key, result)
        finally:
            stream.close()

    def submit(self, key: int, request: GenerationRequest) -> Future[Generation]:
        """Request a turn; `key` has none running. Cancel it with `drop`, not through the future."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((key, (request, future)))
        return future

    def drop(self, key: int) -> None:
        """Cancel the call of `key` and release what the stream keeps for it."""
        self._queue.put((key, None))

    def _start(self, name: str, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _generate_until_closed(self) -> None:
        while not self._is_closing:
            try:
                self.generate(lambda: not self._is_closing)
            except Exception as error:  # noqa: BLE001 - foreign code; its callers get the error
                _log.warning("The policy failed.", exc_info=True)
                self._refuse_all(error)
                time.sleep(IDLE_SECONDS)

    def _refuse_all(self, error: Exception) -> None:
        """Fail all queued and running calls with `error`, while no thread generates."""
        while not self._queue.empty():
            key, call = self._queue.get()
            if call is None:
                self._finish(key, _CLOSED)
            else:
                self._running[key] = call
        for key in [*self._running]:
            self._finish(key, error)

    def _take_calls(self, stream: GenerationStream, *, is_busy: bool) -> None:
        """Take queued calls; wait for one while idle, and for more before a wave."""
        until = time.monotonic() + (GATHER_SECONDS if stream.gathers else 0.0)
        while True:
            seconds = until - time.monotonic() if is_busy else IDLE_SECONDS
            if is_busy and len(self._running) >= len(self.sessions):
                seconds = 0.0
            try:
                key, call = self._queue.get(timeout=max(0.0, seconds))
            except queue.Empty:
                return
            is_busy = True
            if call is None:
                self._finish(key, _CLOSED)
                stream.drop(key)
            else:
                self._running[key] = call
                stream.add(key, call[0])

    def _finish(self, key: int, result: Generation | BaseException) -> None:
        _, future = self._running.pop(key, (None, None))
        if future is None:  # cancelled
            return
        if isinstance(result, Generation):
            future.set_result(result)
        elif isinstance(result, ApiError):
            future.set_exception(result)
        else:
            text = f"The policy failed: {type(result).__name__}: {result}"
            future.set_exception(ApiError(500, text, StopReason.POLICY_ERROR))
