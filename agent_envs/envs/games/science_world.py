"""ScienceWorld: experiments of elementary school in a text world."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import Earnings, final_metric, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolError
from agent_envs.core.tool_env import ToolEnv
from agent_envs.envs.games.science_engine import Game, GameSpec, gold_actions, require_java
from agent_envs.errors import ConfigurationError

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
MAX_COMMAND_CHARS: Final = 500
TOO_LONG_TEXT: Final = f"A command has {MAX_COMMAND_CHARS} characters at most."


class ScienceWorldEnv(ToolEnv):
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

    reward_functions = {
        "solved": final_metric("success"),
        **noted_terms("score_gain"),
        "format": format_term,
    }
    default_rewards = {"solved": 1.0, "score_gain": 1.0, "format": 0.02}
    term_earnings = {"score_gain": Earnings((1.0, 1.0), (-1.0, 0.99))}
    outcome_terms = frozenset({"solved"})
    tool_signatures = ("act(command)",)
    metric_names = ("success", "score", *ToolEnv.metric_names)
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
        require_java()
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
        super().__init__(default_tools=[Tool(self.act, timeout=None)], **shared)

    @property
    def num_tasks(self) -> int:
        return len(self._games)

    def get_task(self, index: int) -> Task:
        name, variation = self._games[index]
        self._game = Game(GameSpec(name, variation, self._simplifications))
        scene = [self._read(part) for part in ("TaskDesc", "Look", "Inventory")]
        task_id = f"scienceworld-{name}-{variation}"
        return Task(id=task_id, question="\n\n".join(scene), answers=())

    def begin_episode(self) -> None:
        self.score = 0
        """The package's score: up to 100; below 0 when the game is lost."""
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
        self.noted["score_gain"] += (score - self.score) / 100
        self.score = score
        return text.strip()

    def _read(self, part: str) -> str:
        return self._game.ask(lambda game: str(getattr(game, f"freeAction{part}")())).strip()

    def is_finished(self) -> bool:
        return self._is_completed

    def metrics(self) -> dict[str, float]:
        own = {"success": float(self.score == 100), "score": self.score / 100}
        return own | super().metrics()

    def reference_actions(self) -> list[str]:
        return [self.write_call("act", command=action) for action in gold_actions(self._game.spec)]

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()
        super().close()
