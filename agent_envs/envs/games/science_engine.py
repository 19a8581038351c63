"""ScienceWorld's simulator: one Java process for all environments of a process.

The simulator draws from one random generator and orders things by their identity. Here the
generator is seeded before every call and identities are constant, so that what happens depends on
the task and on the actions before alone: in any process, and however many games are played at once.
"""

import atexit
import contextlib
import functools
import logging
import os
import shutil
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from agent_envs.core.lookup import require_extra
from agent_envs.errors import MissingExtraError, ServerError

_JAVA_OPTIONS: Final = [
    "-Xmx2g", "-XX:+UseSerialGC",
    # Every object has the same identity hash: sets keep the order in which they were filled.
    "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2",
]  # fmt: skip
_TIMEOUT_SECONDS: Final = 300
"""For one call. Gold paths of genetics take longest: about 20 seconds."""
_MAX_IDLE: Final = 8
"""Interfaces kept for the next games: to make one takes as long as to load a game."""
_FIRST_ACTION: Final = 2
"""What is added to a game's seed for its actions: 0 is for loading it, 1 for its beginning."""
_LOGGER: Final = logging.getLogger(__name__)


T = TypeVar("T")


def require_java() -> None:
    """Check that the package and a Java runtime are there.

    Raises:
        MissingExtraError: If one is missing; says how to install it.
    """
    require_extra("scienceworld", "AgentR1/ScienceWorld-v0", "scienceworld", "py4j")
    if _find_java() is None:
        raise MissingExtraError(
            "AgentR1/ScienceWorld-v0 needs a Java runtime (java). Install one, such as "
            "default-jre-headless on Debian and Ubuntu, or set JAVA_HOME."
        )


def _find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None) or shutil.which("java")


@dataclass(frozen=True, slots=True, kw_only=True)
class GameSpec:
    """Which game: what the simulator loads."""

    task: str
    """The package's name, such as ``boil``."""
    variation: int
    """From 0."""
    simplifications: str
    """The package's names with commas between them; empty for none."""

    @property
    def seed(self) -> int:
        """Where the simulator's draws begin; the same on any machine."""
        return zlib.crc32(f"{self.task} {self.variation} {self.simplifications}".encode())


@dataclass(frozen=True, slots=True)
class Situation:
    """What the simulator says after an action."""

    text: str
    score: int
    """Up to 100; below 0 when the game is lost."""
    is_completed: bool


class EngineDied(Exception):
    """The Java process is gone, or has not answered in time."""


class _Engine:
    """A Java process with the simulator."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            ServerError: If it does not start; says what Java said.
        """
        import scienceworld.constants
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self._lock = threading.Lock()
        self._idle: deque[Any] = deque()
        self.process_id = os.getpid()
        try:
            # It ends by itself when its standard input does: with this process, however that ends.
            port, token, self._process = launch_gateway(
                classpath=scienceworld.constants.JAR_PATH, die_on_exit=True, return_proc=True,
                cwd=scienceworld.constants.BASEPATH, javaopts=_JAVA_OPTIONS,
                java_path=_find_java(), enable_auth=True,
            )  # fmt: skip
            # Its own memory management asks the process from within Python's garbage collector.
            parameters = GatewayParameters(
                port=port, auth_token=token, auto_field=True, read_timeout=_TIMEOUT_SECONDS,
                enable_memory_management=False,
            )  # fmt: skip
            self._gateway = JavaGateway(gateway_parameters=parameters, java_process=self._process)
            self._random = getattr(getattr(self._gateway.jvm.scala.util, "Random$"), "MODULE$")
        except Exception as error:
            raise ServerError(
                f"The Java process of ScienceWorld did not start ({type(error).__name__}: "
                f"{error}). Check that `java -version` works, with 2 GB of memory to spare."
            ) from error
        atexit.register(self.stop)

    def make_interface(self) -> Any:
        """Return the package's interface to one game; an idle one if there is one."""
        with contextlib.suppress(IndexError):
            return self._idle.popleft()
        return self.ask(0, self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface)

    def ask(self, seed: int, question: Callable[[], T]) -> T:
        """Seed the simulator's generator and let `question` call it.

        Raises:
            EngineDied: If the process is gone or hangs.
        """
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            try:
                while len(self._idle) > _MAX_IDLE:
                    self._gateway.detach(self._idle.popleft())
                self._random.setSeed(seed)
                return question()
            except Py4JJavaError:
                raise  # what the simulator itself raises; the process goes on
            except (Py4JError, OSError) as error:
                self.stop()
                raise EngineDied(f"{type(error).__name__}: {error}") from error

    def release(self, interface: Any) -> None:
        """Take an interface back; nothing is asked here, where Python may be collecting garbage."""
        self._idle.append(interface)

    def stop(self) -> None:
        """End the process."""
        atexit.unregister(self.stop)
        if self.process_id != os.getpid():
            return  # a forked copy: the process belongs to the parent
        with contextlib.suppress(Exception):
            self._gateway.close()
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait()

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and in this process: a fork cannot share its connection."""
        return self.process_id == os.getpid() and self._process.poll() is None


_engines: list[_Engine] = []
_starting = threading.Lock()


def shared_engine() -> _Engine:
    """Return the engine of this process; a new one where there is none that runs.

    Raises:
        ServerError: If it does not start.
    """
    with _starting:
        if not _engines or not _engines[0].is_usable:
            for dead in _engines:
                dead.stop()
                if dead.process_id == os.getpid():
                    _LOGGER.warning("The Java process of ScienceWorld has died: here is a new one.")
            _engines[:] = [_Engine()]
        return _engines[0]


class Game:
    """One game, which is its first state and the actions taken since.

    The simulator can save nothing: a copy, or a game whose Java process has died, is brought back
    by taking the actions again, which takes a few milliseconds each.
    """

    def __init__(self, spec: GameSpec) -> None:
        """Take a game that begins when it is first asked for something."""
        self.spec = spec
        self.actions: list[str] = []
        self._engine: _Engine | None = None
        self._interface: Any = None
        self._release: Callable[[], Any] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {"spec": self.spec, "actions": list(self.actions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what another process, or another moment, has left."""
        self.__init__(state["spec"])  # type: ignore[misc]
        self.actions = list(state["actions"])

    def begin(self) -> None:
        """Start over."""
        self.actions.clear()
        self.close()
        self._ask(0, lambda _: None)

    def act(self, action: str) -> Situation:
        """Take an action.

        Raises:
            ServerError: If the simulator dies of it, twice.
        """
        action = action.encode("utf-8", "replace").decode()
        number = _FIRST_ACTION + len(self.actions)
        situation = self._ask(number, lambda interface: _take(interface, action))
        self.actions.append(action)
        return situation

    def read(self, function: str) -> str:
        """Return what a function of the interface says that takes no time in the game."""
        return self._ask(0, lambda interface: str(getattr(interface, function)()))

    def read_list(self, function: str) -> list[str]:
        """Return what such a function lists."""
        return self._ask(0, lambda interface: list(getattr(interface, function)()))

    def close(self) -> None:
        """Let the simulator forget the game."""
        self._engine = self._interface = None
        self._release()

    def _ask(self, number: int, question: Callable[[Any], T]) -> T:
        problem = ""
        for _ in range(2):
            try:
                if self._engine is None or not self._engine.is_usable:
                    self._bring_back()
                assert self._engine is not None  # noqa: S101 - just brought back
                seed = self.spec.seed + number
                return self._engine.ask(seed, lambda: question(self._interface))
            except EngineDied as error:
                problem = str(error)
        raise ServerError(
            f"The Java process of ScienceWorld died twice at the same action ({problem}). Check "
            "the machine's memory: it takes up to 2 GB."
        )

    def _bring_back(self) -> None:
        self.close()
        engine, spec = shared_engine(), self.spec
        interface = engine.make_interface()
        self._release = weakref.finalize(self, engine.release, interface)
        arguments = (spec.task, spec.variation, spec.simplifications, False)
        engine.ask(spec.seed, lambda: interface.load(*arguments))
        engine.ask(spec.seed + 1, lambda: interface.reset())
        for number, action in enumerate(self.actions, start=_FIRST_ACTION):
            engine.ask(spec.seed + number, functools.partial(interface.step, action))
        self._engine, self._interface = engine, interface


def _take(interface: Any, action: str) -> Situation:
    text = interface.step(action)
    score = round(100 * interface.getScore())
    return Situation(text, score, bool(interface.getCompleted()) or score < 0)


@functools.lru_cache(maxsize=1024)
def gold_actions(spec: GameSpec) -> tuple[str, ...]:
    """Return the package's own solution of a game, up to where it is solved.

    Raises:
        ServerError: If the simulator dies of it.
    """
    engine = shared_engine()
    interface = engine.make_interface()
    try:
        arguments = (spec.task, spec.variation, spec.simplifications, True)
        engine.ask(spec.seed, lambda: interface.load(*arguments))
        actions = engine.ask(spec.seed, lambda: list(interface.getGoldActionSequence()))
    except EngineDied as error:
        raise ServerError(f"The Java process of ScienceWorld died: {error}") from error
    finally:
        engine.release(interface)
    game = Game(spec)
    game.begin()
    for number, action in enumerate(actions, start=1):
        if game.act(action).is_completed:
            return tuple(actions[:number])
    return tuple(actions)
