"""ScienceWorld's simulator: one Java process for all environments of a Python process.

The simulator uses one global random generator and orders objects by identity. The generator is
seeded before every call, and all identity hashes are equal, so that a game depends only on its
task and the actions so far.
"""

import atexit
import contextlib
import functools
import os
import shutil
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from agent_envs.core.lookup import require_extra
from agent_envs.errors import MissingExtraError, ServerError

_JAVA_OPTIONS: Final = [
    "-Xmx2g", "-XX:+UseSerialGC",
    # Every object has the same identity hash: sets keep the order in which they were filled.
    "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2",
]  # fmt: skip
_TIMEOUT_SECONDS: Final = 300
"""Limit of one call; gold paths of genetics take up to 20 seconds."""
_MAX_IDLE: Final = 8
"""Interfaces that are kept for later games: making one takes as long as loading a game."""
_FIRST_ACTION: Final = 2
"""Part of the seed; 0 is for loading a game, 1 for its reset."""
T = TypeVar("T")


def require_java() -> None:
    """Raise `MissingExtraError` unless the package and a Java runtime are installed."""
    require_extra("scienceworld", "AgentR1/ScienceWorld-v0", "scienceworld", "py4j")
    if _find_java() is None:
        raise MissingExtraError(
            "AgentR1/ScienceWorld-v0 needs a Java runtime (java). Install one, such as "
            "default-jre-headless on Debian and Ubuntu, or set JAVA_HOME."
        )


def _find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None) or shutil.which("java")


class GameSpec(NamedTuple):
    """Arguments of the simulator for one game, as the package names them."""

    task: str
    variation: int
    simplifications: str
    """Separated by commas."""

    @property
    def seed(self) -> int:
        """Seed of the simulator, equal on all machines."""
        return zlib.crc32(f"{self.task} {self.variation} {self.simplifications}".encode())


class _Engine:
    """A Java process with the simulator."""

    def __init__(self) -> None:
        import scienceworld.constants
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self._lock = threading.Lock()
        self.idle: deque[Any] = deque()
        self._owner = os.getpid()
        try:
            # The process ends when its standard input does, so with this process.
            port, token, self._process = launch_gateway(
                classpath=scienceworld.constants.JAR_PATH, die_on_exit=True, return_proc=True,
                cwd=scienceworld.constants.BASEPATH, javaopts=_JAVA_OPTIONS,
                java_path=_find_java(), enable_auth=True,
            )  # fmt: skip
            # py4j's memory management would call the process from Python's garbage collector.
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

    def load(self, spec: GameSpec, *, with_gold_actions: bool) -> Any:
        """Return the package's interface to a game, for use in `ask`."""
        try:
            interface = self.idle.popleft()
        except IndexError:
            make = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface
            interface = self.ask(0, make)
        self.ask(spec.seed, lambda: interface.load(*spec, with_gold_actions))
        return interface

    def ask(self, seed: int, call: Callable[[], T]) -> T:
        """Seed the simulator's generator, and return the result of `call`."""
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            try:
                while len(self.idle) > _MAX_IDLE:
                    self._gateway.detach(self.idle.popleft())
                self._random.setSeed(seed)
                return call()
            except Py4JJavaError:
                raise  # an exception of the simulator itself; the process continues
            except (Py4JError, OSError) as error:
                self.stop()
                raise ServerError(
                    f"The Java process of ScienceWorld died ({type(error).__name__}: {error}). "
                    "Check the machine's memory: it takes up to 2 GB."
                ) from error

    def stop(self) -> None:
        """End the process."""
        atexit.unregister(self.stop)
        if self._owner == os.getpid():  # else a forked copy
            with contextlib.suppress(Exception):
                self._gateway.close()
            self._process.kill()
            self._process.communicate()

    @property
    def is_usable(self) -> bool:
        """Whether the process runs and belongs to this one: a fork cannot share a connection."""
        return self._owner == os.getpid() and self._process.poll() is None


_engines: list[_Engine] = []
_starting = threading.Lock()


def _shared_engine() -> _Engine:
    """Return the running engine of this process, or a new one."""
    with _starting:
        if not _engines or not _engines[0].is_usable:
            for dead in _engines:
                dead.stop()
            _engines[:] = [_Engine()]
        return _engines[0]


class Game:
    """One game: its specification and the actions so far.

    The simulator has no snapshots. A copy, or a game whose Java process died, is restored by
    repeating its actions, at a few milliseconds each.
    """

    def __init__(self, spec: GameSpec, actions: tuple[str, ...] = ()) -> None:
        """Make a game that starts with its first call."""
        self.spec = spec
        self.actions = list(actions)
        self._engine: _Engine | None = None
        self._interface: Any = None
        self._release: Callable[[], Any] = lambda: None

    def __reduce__(self) -> Any:
        return Game, (self.spec, tuple(self.actions))

    def act(self, action: str) -> tuple[str, int, bool]:
        """Take an action; return text, score (below 0 if the game is lost), and if it is over."""
        action = action.encode("utf-8", "replace").decode()

        def step(game: Any) -> tuple[str, int, bool]:
            text = game.step(action)
            score = round(100 * game.getScore())
            return text, score, bool(game.getCompleted()) or score < 0

        outcome = self.ask(step, number=_FIRST_ACTION + len(self.actions))
        self.actions.append(action)
        return outcome

    def ask(self, call: Callable[[Any], T], number: int = 0) -> T:
        """Return the result of a call of the package's interface; `number` is part of the seed.

        Raises:
            ServerError: If the Java process dies twice.
        """
        seed = self.spec.seed + number
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
        engine, seed = _shared_engine(), self.spec.seed
        interface = engine.load(self.spec, with_gold_actions=False)
        # Makes no call, since the garbage collector may run it.
        self._release = weakref.finalize(self, engine.idle.append, interface)
        engine.ask(seed + 1, lambda: interface.reset())
        for number, action in enumerate(self.actions, start=_FIRST_ACTION):
            engine.ask(seed + number, functools.partial(interface.step, action))
        self._interface = interface
        return engine


@functools.lru_cache(maxsize=1024)
def gold_actions(spec: GameSpec) -> tuple[str, ...]:
    """Return the package's own solution of a game, up to where it is solved."""
    engine = _shared_engine()
    interface = engine.load(spec, with_gold_actions=True)
    actions = engine.ask(spec.seed, lambda: list(interface.getGoldActionSequence()))
    engine.idle.append(interface)
    game = Game(spec)
    for number, action in enumerate(actions, start=1):
        *_, is_over = game.act(action)
        if is_over:
            return tuple(actions[:number])
    return tuple(actions)
