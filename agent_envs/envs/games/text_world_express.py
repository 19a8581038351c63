"""TextWorldExpress: cooking, tidying up and searching in generated houses."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import SCORE
from agent_envs.core.tasks import Task
from agent_envs.envs.games.java_games import Game, JavaGameEnv, Simulator, require_java
from agent_envs.errors import ConfigurationError, DataError

SIMULATOR: Final = Simulator(
    "AgentR1/TextWorldExpress-v0", "textworld_express", "textworldexpress",
    "textworldexpress.runtime.PythonInterface",
)  # fmt: skip
GAMES: Final[Mapping[str, Mapping[str, int]]] = {
    "cookingworld": {
        "numLocations": 11, "numIngredients": 3, "numDistractorItems": 10, "includeDoors": 1,
        "limitInventorySize": 1,
    },
    "twc": {"numLocations": 3, "numItemsToPutAway": 4, "includeDoors": 0, "limitInventorySize": 0},
    "coin": {
        "numLocations": 11, "numDistractorItems": 0, "includeDoors": 1, "limitInventorySize": 1,
    },
}  # fmt: skip
"""The package's parameters of each game and their defaults."""
_AGENTS: Final = {
    "cookingworld": "CookingWorldGoldAgent", "twc": "TWCGoldAgent", "coin": "CoinGoldAgent",
}  # fmt: skip
SPLITS: Final[Mapping[str, int]] = {"train": 0, "dev": 10_000, "test": 20_000}
"""First of the package's seeds."""
NUM_SEEDS: Final = 1000
_MAX_ATTEMPTS: Final = 50
"""As in the package."""
_OPPOSITE: Final = {"north": "south", "south": "north", "east": "west", "west": "east"}


class GameSpec(NamedTuple):
    """Arguments of the simulator for one game, as the package names them."""

    game: str
    parameters: str
    seed: int
    fold: str


class TextWorldExpressGame(Game):
    """A game of TextWorldExpress."""

    simulator = SIMULATOR
    first_text = ""
    """Task and first room, once the game is loaded."""

    def start_calls(self) -> Sequence[Callable[[Any], Any]]:
        return (self._begin,)

    def _begin(self, interface: Any) -> None:
        if problem := interface.load(*self.spec[:2]):
            raise ConfigurationError(f"parameters={self.spec.parameters!r}: {problem.strip()}")
        begun = json.loads(interface.generateNewGameJSON(*self.spec[2:], False))
        scene = (interface.getTaskDescription(), begun["observation"])
        self.first_text = "\n\n".join(map(str.strip, scene))

    def step(self, interface: Any, action: str) -> tuple[str, float, bool]:
        result = json.loads(interface.stepJSON(action))
        is_over = result["tasksuccess"] or result["taskfailure"] or result["score"] >= 1.0
        return result["observation"], result["score"], is_over

    def solution(self, *, detours: bool) -> list[str]:
        """Return a solution of the package's agent, which walks at random."""
        gateway = self.gateway
        make_agent = getattr(gateway.jvm.textworldexpress.goldagent, _AGENTS[self.spec.game])
        for seed in range(_MAX_ATTEMPTS):
            house = TextWorldExpressGame(self.spec).ask(lambda interface: interface.game())
            agent, random = make_agent(house), gateway.jvm.scala.util.Random(seed)
            found = agent.mkGoldPath(random)
            path = list(found._2) if found._1 else []
            for each in (house, agent, random, found):
                gateway.detach(each)
            if path:
                game = TextWorldExpressGame(self.spec)
                return game.act_until_over(path) if detours else game._without_detours(path)
        raise DataError(f"{self.spec}: the package's agent solved it in none of its attempts.")

    def _without_detours(self, path: Sequence[str]) -> list[str]:
        """Take the path; return it without loops between the actions that are more than a walk."""
        self.ask(lambda interface: None)  # starts it
        here = _room_of(self.first_text)
        walk: dict[str, list[tuple[str, str, str]]] = {here: []}  # ways from the last such action
        closed, shorter = set(), []
        for action in path:
            text, *_ = self.act(action)
            verb, _, direction = action.rpartition(" ")
            if verb == "move":
                there = _room_of(text)
                walk.setdefault(there, [*walk[here], (here, direction, there)])
                here = there
            elif verb == "open door to":
                closed.add((here, direction))
            elif verb not in ("look", "close door to"):
                for before, direction, after in walk[here]:
                    for door in {(before, direction), (after, _OPPOSITE[direction])} & closed:
                        closed.remove(door)
                        shorter.append(f"open door to {direction}")
                    shorter.append(f"move {direction}")
                shorter.append(action)
                walk = {here: []}
        return shorter


def _room_of(text: str) -> str:
    return text.partition("You are in the ")[2].partition(".")[0]


class TextWorldExpressEnv(JavaGameEnv):
    """TextWorldExpress (Jansen and Côté, 2022, arXiv 2208.01174; ``textworld_express``).

    Task, by `game`: to cook a meal by a recipe (``"cookingworld"``), to put things where they
    belong, by common sense (``"twc"``), or to find and take a coin (``"coin"``), in a house that is
    generated for each task. The agent passes the same rooms again, and only some steps count. Tool:
    ``act(command)``. Reward terms: ``solved`` at the end (outcome); ``score_gain`` (change of the
    package's score; all steps together earn the final score) and ``format`` on the way (process).
    A spoilt ingredient loses the game of cooking. The episode ends when the game is won or lost, or
    with an answer, which gives up.

    The tasks of a split are the package's 1,000 seeds; ingredients and things to put away differ
    between splits. One Java process (up to 2 GB) serves all environments of a process, one call at
    a time. Snapshots repeat the actions of the episode, at about 0.5 ms each.

    Version history: v0, first version.
    """

    default_rewards = {"solved": 1.0, "score_gain": 0.1, "format": 0.02}
    term_earnings = {"score_gain": SCORE}
    full_score = 1
    data_source = "the package `textworld-express`; licence: Apache-2.0"
    not_in_snapshots = frozenset({"_arguments", "_detours", "_family", "_first_seed"})
    default_system_prompt = (
        "You are in a house and have a task. Act by one command after the other: look around, "
        "inventory, move DIRECTION, open door to DIRECTION, examine OBJ, open OBJ, close OBJ, take "
        "OBJ, put OBJ in OBJ, read OBJ, chop OBJ, slice OBJ, dice OBJ, cook OBJ in OBJ, prepare "
        "meal, eat OBJ. OBJ is the name of a thing, DIRECTION is north, south, east or west."
    )

    def __init__(
        self,
        *,
        game: str = "cookingworld",
        split: str = "train",
        parameters: Mapping[str, int] | None = None,
        detours: bool = False,
        **shared: Any,
    ) -> None:
        """Choose the games.

        Args:
            game: ``"cookingworld"``, ``"twc"`` or ``"coin"``.
            split: The package's ``"train"``, ``"dev"`` or ``"test"``.
            parameters: Some of the package's parameters of the game, see `GAMES`; such as
                ``{"numLocations": 5, "includeDoors": 0}`` for five rooms without doors.
            detours: Whether reference actions keep the detours of the package's agent: they show
                how to explore, but may need more turns than the limit.
            shared: Arguments of `ToolEnv`.
        """
        require_java(SIMULATOR)
        self._detours = detours
        values = dict(lookup(GAMES, game, kind="game"))
        if not isinstance(parameters, Mapping | None):
            raise ConfigurationError(f"parameters must be a mapping of names, not {parameters!r}.")
        for name, value in (parameters or {}).items():
            lookup(values, name, kind=f"parameter of the game {game!r}")
            if type(value) is not int:
                raise ConfigurationError(f"parameters: {name} must be an integer, not {value!r}.")
            values[name] = value
        self._first_seed = lookup(SPLITS, split, kind="split")
        self._family = "-".join(["twx", game, *map(str, values.values()), split])
        packed = ",".join(f"{name}={value}" for name, value in values.items())
        self._arguments = game, packed, split
        super().__init__(**shared)

    @property
    def num_tasks(self) -> int:
        return NUM_SEEDS

    def get_task(self, index: int) -> Task:
        game, parameters, fold = self._arguments
        self._game = TextWorldExpressGame(
            GameSpec(game, parameters, self._first_seed + index, fold)
        )
        self._game.ask(lambda interface: None)  # starts it
        return Task(id=f"{self._family}-{index}", question=self._game.first_text, answers=())

    def act(self, command: str) -> str:
        """Do something in the game.

        Args:
            command: For example "move east" or "take knife".
        """
        return super().act(command)

    def reference_actions(self) -> list[str]:
        actions = TextWorldExpressGame(self._game.spec).solution(detours=self._detours)
        return [self.write_call("act", command=action) for action in actions]
