"""Text games whose simulator is a Java program: one process for all environments of a process."""

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from agent_envs.core.lookup import require_extra
from agent_envs.core.rewards import final_metric, format_term, noted_terms
from agent_envs.core.tool import Tool, ToolError
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import MissingExtraError, ServerError

MAX_COMMAND_CHARS: Final = 500
TOO_LONG_TEXT: Final = f"A command has {MAX_COMMAND_CHARS} characters at most."
_JAVA_OPTIONS: Final = [
    "-Xmx2g", "-XX:+UseSerialGC",
    # Every object has the same identity hash: sets keep the order in which they were filled.
    "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2",
]  # fmt: skip
_TIMEOUT_SECONDS: Final = 300
"""Limit of one call; ScienceWorld's gold paths of genetics take up to 20 seconds."""
_MAX_IDLE: Final = 8
"""Interfaces that are kept for later games: making one takes as long as loading a game."""
_FIRST_ACTION: Final = 2
"""Part of the seed; 0 and 1 are those of the calls that start a game."""
T = TypeVar("T")


class Simulator(NamedTuple):
    """A Python package with a simulator in Java."""

    env_id: str
    package: str
    extra: str
    interface: str
    """The Java class for calls from Python, with its packages."""
    has_global_generator: bool = False
    """Whether it draws from Scala's global random generator, too."""


def require_java(simulator: Simulator) -> None:
    """Raise `MissingExtraError` unless the package and a Java runtime are installed."""
    require_extra(simulator.extra, simulator.env_id, simulator.package, "py4j")
    if _find_java() is None:
        raise MissingExtraError(
            f"{simulator.env_id} needs a Java runtime (java). Install one, such as "
            "default-jre-headless on Debian and Ubuntu, or set JAVA_HOME."
        )


def _find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None) or shutil.which("java")


class _Engine:
    """A Java process with a simulator.

    Simulators order objects by identity, and some draw from Scala's global random generator. All
    identity hashes are equal, and the generator is seeded before every call, so that a game depends
    only on its specification and the actions so far.
    """

    def __init__(self, simulator: Simulator) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        constants = importlib.import_module(f"{simulator.package}.constants")
        self._lock = threading.Lock()
        self._name = f"The Java process of {simulator.env_id}"
        self.idle: deque[Any] = deque()
        self._owner = os.getpid()
        try:
            # The process ends when its standard input does, so with this process.
            port, token, self._process = launch_gateway(
                classpath=constants.JAR_PATH, die_on_exit=True, return_proc=True,
                cwd=constants.BASEPATH, javaopts=_JAVA_OPTIONS,
                java_path=_find_java(), enable_auth=True,
            )  # fmt: skip
            # py4j's memory management would call the process from Python's garbage collector.
            parameters = GatewayParameters(
                port=port, auth_token=token, auto_field=True, read_timeout=_TIMEOUT_SECONDS,
                enable_memory_management=False,
            )  # fmt: skip
            self.gateway = JavaGateway(gateway_parameters=parameters, java_process=self._process)
            jvm = self.gateway.jvm
            self._make = functools.reduce(getattr, simulator.interface.split("."), jvm)
            random = getattr(jvm.scala.util, "Random$")
            self._random = getattr(random, "MODULE$") if simulator.has_global_generator else None
        except Exception as error:
            raise ServerError(
                f"{self._name} did not start ({type(error).__name__}: {error}). "
                "Check that `java -version` works, with 2 GB of memory to spare."
            ) from error
        atexit.register(self.stop)

    def interface(self) -> Any:
        """Return an interface for one game, for use in `ask`."""
        try:
            return self.idle.popleft()
        except IndexError:
            return self.ask(0, self._make)

    def ask(self, seed: int, call: Callable[[], T]) -> T:
        """Seed the simulator's generator, and return the result of `call`."""
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            try:
                while len(self.idle) > _MAX_IDLE:
                    self.gateway.detach(self.idle.popleft())
                if self._random is not None:
                    self._random.setSeed(seed)
                return call()
            except Py4JJavaError:
                raise  # an exception of the simulator itself; the process continues
            except (Py4JError, OSError) as error:
                self.stop()
                raise ServerError(
                    f"{self._name} died ({type(error).__name__}: {error}). "
                    "Check the machine's memory: it takes up to 2 GB."
                ) from error

    def stop(self) -> None:
        """End the process."""
        atexit.unregister(self.stop)
        if self._owner == os.getpid():  # else a forked copy
            with contextlib.suppress(Exception):
                self.gateway.close()
            self._process.kill()
            with contextlib.suppress(OSError):  # py4j's threads may close the pipes first
                self._process.communicate()

    @property
    def is_usable(self) -> bool:
        """Whether the process runs and belongs to this one: a fork cannot share a connection."""
        return self._owner == os.getpid() and self._process.poll() is None


_engines: dict[Simulator, _Engine] = {}
_starting = threading.Lock()


def shared_engine(simulator: Simulator) -> _Engine:
    """Return the running engine of this process, or a new one."""
    with _starting:
        engine = _engines.get(simulator)
        if engine is None or not engine.is_usable:
            stop_engine(simulator)
            engine = _engines[simulator] = _Engine(simulator)
        return engine


def stop_engine(simulator: Simulator) -> None:
    """End the Java process of a simulator, if there is one."""
    if engine := _engines.pop(simulator, None):
        engine.stop()


class Game:
    """One game: its specification and the actions so far.

    Simulators have no snapshots. A copy, or a game whose Java process died, is restored by
    repeating its actions, at a few milliseconds each.
    """

    simulator: ClassVar[Simulator]

    def __init__(self, spec: Any, actions: tuple[str, ...] = ()) -> None:
        """Make a game that starts with its first call."""
        self.spec = spec
        self.actions = list(actions)
        self._engine: _Engine | None = None
        self._interface: Any = None
        self._release: Callable[[], Any] = lambda: None

    def __reduce__(self) -> Any:
        return type(self), (self.spec, tuple(self.actions))

    @property
    def seed(self) -> int:
        """Seed of the simulator, equal on all machines."""
        return zlib.crc32(" ".join(map(str, self.spec)).encode())

    @property
    def gateway(self) -> Any:
        """py4j's gateway; it keeps each Java object that a call returns until it is detached."""
        return shared_engine(self.simulator).gateway

    def start_calls(self) -> Sequence[Callable[[Any], Any]]:
        """Return the calls of an interface, at most two, that start the game."""
        raise NotImplementedError

    def step(self, interface: Any, action: str) -> tuple[str, float, bool]:
        """Take an action; return text, score, and whether the game is over."""
        raise NotImplementedError

    def act(self, action: str) -> tuple[str, float, bool]:
        """Take an action and keep it; return text, score, and whether the game is over."""
        action = action.encode("utf-8", "replace").decode()
        number = _FIRST_ACTION + len(self.actions)
        outcome = self.ask(lambda interface: self.step(interface, action), number)
        self.actions.append(action)
        return outcome

    def act_until_over(self, actions: Sequence[str]) -> list[str]:
        """Take actions until the game is over; return those that were taken."""
        for number, action in enumerate(actions, start=1):
            *_, is_over = self.act(action)
            if is_over:
                return list(actions[:number])
        return list(actions)

    def ask(self, call: Callable[[Any], T], number: int = 0) -> T:
        """Return the result of a call of the package's interface; `number` is part of the seed.

        Raises:
            ServerError: If the Java process dies twice.
        """
        seed = self.seed + number
        if self._engine is None or not self._engine.is_usable:
            self._engine = self._start()
        try:
            return self._engine.ask(seed, lambda: call(self._interface))
        except ServerError:  # it died: once more, in a new process
            self._engine = self._start()
            return self._engine.ask(seed, lambda: call(self._interface))

    def close(self) -> None:
        self._engine = self._interface = None
        self._release()

    def _start(self) -> _Engine:
        self.close()
        engine, seed = shared_engine(self.simulator), self.seed
        interface = engine.interface()
        for number, call in enumerate(self.start_calls()):
            engine.ask(seed + number, functools.partial(call, interface))
        # Makes no call, since the garbage collector may run it.
        self._release = weakref.finalize(self, engine.idle.append, interface)
        for number, action in enumerate(self.actions, start=_FIRST_ACTION):
            engine.ask(seed + number, functools.partial(self.step, interface, action))
        self._interface = interface
        return engine


class JavaGameEnv(ToolEnv):
    """A game of a simulator in Java, with one tool: ``act(command)``.

    `get_task` sets ``_game``. Commands are calls, so a lost Java process does not lose the episode.
    """

    reward_functions = {
        "solved": final_metric("success"),
        **noted_terms("score_gain"),
        "format": format_term,
    }
    outcome_terms = frozenset({"solved"})
    tool_signatures = ("act(command)",)
    metric_names = ("success", "score", *ToolEnv.metric_names)
    full_score: ClassVar[int]
    """The package's score of a solved game."""
    _game: Game

    def __init__(self, **shared: Any) -> None:
        """Offer the tool; `shared` are arguments of `ToolEnv`."""
        super().__init__(default_tools=[Tool(self.act, timeout=None)], **shared)

    def begin_episode(self) -> None:
        self.score = 0.0
        """The package's score: up to `full_score`."""
        self._is_completed = False

    def act(self, command: str) -> str:
        """Do something in the game.

        Args:
            command: For example "open door to kitchen" or "pick up thermometer".
        """
        if len(command) > MAX_COMMAND_CHARS:
            raise ToolError(TOO_LONG_TEXT)
        if self._is_completed:
            raise ToolError("The game is over.")
        text, score, self._is_completed = self._game.act(command.replace("\n", " "))
        self.noted["score_gain"] += (score - self.score) / self.full_score
        self.score = score
        return text.strip()

    def is_finished(self) -> bool:
        return self._is_completed

    def metrics(self) -> dict[str, float]:
        score = self.score / self.full_score
        return {"success": float(score == 1.0), "score": score, **super().metrics()}

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()
        super().close()
