"""ScienceWorld: experiments of elementary school in a text world."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import Earnings
from agent_envs.core.tasks import Task
from agent_envs.envs.games.java_games import Game, JavaGameEnv, Simulator, require_java
from agent_envs.errors import ConfigurationError

SIMULATOR: Final = Simulator(
    "AgentR1/ScienceWorld-v0", "scienceworld", "scienceworld",
    "scienceworld.runtime.pythonapi.PythonInterface", has_global_generator=True,
)  # fmt: skip
VARIATIONS: Final[Mapping[str, int]] = {
    "boil": 30, "change-the-state-of-matter-of": 30, "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36, "chemistry-mix-paint-tertiary-color": 36,
    "find-animal": 300, "find-living-thing": 300, "find-non-living-thing": 300, "find-plant": 300,
    "freeze": 30, "grow-fruit": 126, "grow-plant": 126, "identify-life-stages-1": 14,
    "identify-life-stages-2": 10, "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162, "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125, "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300, "melt": 30,
    "mendelian-genetics-known-plant": 120, "mendelian-genetics-unknown-plant": 480,
    "power-component": 20, "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900, "test-conductivity-of-unknown-substances": 600,
    "use-thermometer": 540,
}  # fmt: skip
"""Number of variations of each task."""
_SPLITS: Final[Mapping[str, tuple[int, int | None]]] = {
    "train": (0, 2), "dev": (2, 3), "test": (3, None),
}  # fmt: skip
"""Quarters of the variations, as in the package; the last split takes the remainder."""
SIMPLIFICATIONS: Final = (
    "easy", "teleportAction", "openDoors", "openContainers", "selfWateringFlowerPots",
    "noElectricalAction",
)  # fmt: skip


class GameSpec(NamedTuple):
    """Arguments of the simulator for one game, as the package names them."""

    task: str
    variation: int
    simplifications: str
    """Separated by commas."""


class ScienceWorldGame(Game):
    """A game of ScienceWorld; its score is below 0 when it is lost."""

    simulator = SIMULATOR

    def start_calls(self) -> Sequence[Callable[[Any], Any]]:
        return lambda interface: interface.load(*self.spec, False), lambda game: game.reset()

    def step(self, interface: Any, action: str) -> tuple[str, float, bool]:
        text = interface.step(action)
        score = round(100 * interface.getScore())
        return text, score, bool(interface.getCompleted()) or score < 0


@functools.lru_cache(maxsize=1024)
def gold_actions(spec: GameSpec) -> tuple[str, ...]:
    """Return the package's own solution of a game, up to where it is solved."""
    solver = ScienceWorldGame(spec)
    solver.ask(lambda interface: interface.load(*spec, True))
    actions = solver.ask(lambda interface: list(interface.getGoldActionSequence()))
    return tuple(ScienceWorldGame(spec).act_until_over(actions))


class ScienceWorldEnv(JavaGameEnv):
    """ScienceWorld (Wang et al., 2022, arXiv 2203.07540; package ``scienceworld``).

    Task: an experiment in a simulated house, such as to boil water or to find an animal; 30 kinds
    with up to 1386 variations. Tool: ``act(command)``. Reward terms: ``solved`` at the end
    (outcome); ``score_gain`` (change of the package's score, as a share of 100; all steps together
    earn the final score) and ``format`` on the way (process). A focus on the wrong thing loses the
    game: its score is -100. The episode ends when the game is won or lost, or with an answer, which
    gives up. The package counts 100 moves, ten for a ``wait``; here all turns count as one.

    One Java process (up to 2 GB) serves all environments of a process, one call at a time.
    Snapshots repeat the actions of the episode, at about 5 ms each and 100 ms in the genetics
    tasks.

    Version history: v0, first version.
    """

    default_rewards = {"solved": 1.0, "score_gain": 1.0, "format": 0.02}
    term_earnings = {"score_gain": Earnings((1.0, 1.0), (-1.0, 0.99))}
    full_score = 100
    data_source = "the package `scienceworld`; licence: Apache-2.0"
    not_in_snapshots = frozenset({"_games", "_simplifications"})
    default_system_prompt = (
        "You do an experiment in a simulated house. Act by one command after the other: open OBJ, "
        "close OBJ, go OBJ, pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, dunk OBJ "
        "in OBJ, mix OBJ, activate OBJ, deactivate OBJ, use OBJ on OBJ, connect OBJ to OBJ, "
        "disconnect OBJ, eat OBJ, flush OBJ, read OBJ, focus on OBJ, look around, look at OBJ, "
        "look in OBJ, inventory, task, wait (ten moments), wait1 (one moment). OBJ is the name of "
        "a thing. Focus only on what the task asks you to focus on: a wrong focus loses the game."
    )

    def __init__(
        self,
        *,
        task: str | Sequence[str] | None = None,
        split: str = "train",
        variations: int | None = None,
        simplifications: str | Sequence[str] = (),
        **shared: Any,
    ) -> None:
        """Choose the games.

        Args:
            task: Names of tasks, such as ``"boil"``; all 30 by default.
            split: The package's ``"train"``, ``"dev"`` or ``"test"``.
            variations: Number of variations of each task, the first of the split; all by default,
                when some tasks have a hundred times as many as others.
            simplifications: The package's, a subset of `SIMPLIFICATIONS`; ``"easy"`` for all. Tasks
                about electricity cannot be solved with ``"noElectricalAction"``.
            shared: Arguments of `ToolEnv`.
        """
        require_java(SIMULATOR)
        names = (task,) if isinstance(task, str) else tuple(VARIATIONS if task is None else task)
        start, stop = lookup(_SPLITS, split, kind="split")
        chosen = [simplifications] if isinstance(simplifications, str) else list(simplifications)
        for name in chosen:
            lookup(dict.fromkeys(SIMPLIFICATIONS), name, kind="simplification")
        self._simplifications = ",".join(chosen)
        self._games: list[tuple[str, int]] = []
        for name in names:
            count = lookup(VARIATIONS, name, kind="task")
            last = count if stop is None else stop * (count // 4)
            own = range(start * (count // 4), last)[:variations]
            self._games += [(name, variation) for variation in own]
        if not self._games:
            raise ConfigurationError(f"task={task!r}, variations={variations} select no game.")
        super().__init__(**shared)

    @property
    def num_tasks(self) -> int:
        return len(self._games)

    def get_task(self, index: int) -> Task:
        name, variation = self._games[index]
        self._game = ScienceWorldGame(GameSpec(name, variation, self._simplifications))
        scene = [self._read(part) for part in ("TaskDesc", "Look", "Inventory")]
        task_id = f"scienceworld-{name}-{variation}"
        return Task(id=task_id, question="\n\n".join(scene), answers=())

    def _read(self, part: str) -> str:
        return self._game.ask(lambda game: str(getattr(game, f"freeAction{part}")())).strip()

    def reference_actions(self) -> list[str]:
        return [self.write_call("act", command=action) for action in gold_actions(self._game.spec)]
