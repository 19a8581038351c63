"""Text adventures on the library TextWorld: generated ones, and those of ALFWorld."""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.rewards import Progress, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError, DataError

_SPLITS: Final = {"train": 0, "test": 1}
_MAX_DRAWS: Final = 20
_STATUS_LINE: Final = re.compile(r"\n?>\s*-= .*? =-\d*/\d*\s*$|\s*>\s*$", re.DOTALL)


class TextGameEnv(ToolEnv):
    """A game of the library TextWorld.

    Tool: ``act(command)``. Reward terms: ``won`` at the end (outcome); ``score_gain`` (growth of
    the best score so far, as a share of the game's highest; a won game completes it) and ``format``
    on the way (process). The episode ends when the game is won or lost, or with an answer, which
    gives up.
    """

    reward_functions = {**noted_terms("won", "score_gain"), "format": format_term}
    default_rewards = {"won": 1.0, "score_gain": 0.1, "format": 0.02}
    computes_only = True
    outcome_terms = frozenset({"won"})
    tool_signatures = ("act(command)",)
    metric_names = ("success", "score", *ToolEnv.metric_names)
    not_in_snapshots = frozenset({"_game", "_state"})
    default_system_prompt = (
        "You play a text adventure. Reach the objective by acting, one command after the other, "
        "such as: go east, take the key, open the chest with the key, look, inventory."
    )

    def __init__(self, **shared: Any) -> None:
        """Open no game yet; `shared` are arguments of `ToolEnv`."""
        self._game: Any = None
        super().__init__(default_tools=[Tool(self.act, timeout=None)], **shared)

    def _begin(self, path: Path, wrappers: Sequence[Any], task_id: str) -> Task:
        import textworld

        names = ("feedback", "objective", "won", "lost", "score", "max_score", "policy_commands")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._close_game()
            wanted = textworld.EnvInfos(**dict.fromkeys(names, True))
            self._game = textworld.start(str(path), wanted, list(wrappers))
            self._state = self._game.reset()
        scene = _readable(self._state.feedback)
        scene = scene[max(0, scene.find("-= ")) :]  # without the title picture and the welcome
        question = f"{self._state.objective or ''}\n\n{scene}".strip()
        commands = tuple(self._state.policy_commands or ())
        return Task(id=task_id, question=question, answers=(), data={"commands": commands})

    def begin_episode(self) -> None:
        self._score = 0.0
        self._commands: list[str] = []
        self._progress = Progress()

    def __getstate__(self) -> dict[str, Any]:
        left_out = TextGameEnv.not_in_snapshots
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; its game starts again, since the interpreter cannot be copied."""
        vars(self).update(state, _game=None)
        if self.task_index is not None:
            self.on_restore()

    def on_restore(self) -> None:
        """Restart the game and repeat its commands: the interpreter has no snapshots."""
        self.get_task(self.task_index or 0)
        self._repeat(self._commands)

    def _repeat(self, commands: Sequence[str]) -> None:
        for command in commands:
            self._state, _, _ = self._game.step(command)

    def act(self, command: str) -> str:
        """Do something in the game.

        Args:
            command: For example "go east" or "take the key".
        """
        command = command.replace("\n", " ")
        self._state, _, _ = self._game.step(command)
        self._commands.append(command)
        self._score = float(self._state.score or 0) / (self._state.max_score or 1)
        self.noted["won"] = float(self.is_won)
        reached = 1.0 if self.is_won else min(1.0, self._score)
        self.noted["score_gain"] += self._progress.advance(reached)
        return _readable(self._state.feedback)

    def is_finished(self) -> bool:
        return bool(self._state.won or self._state.lost)

    @property
    def is_won(self) -> bool:
        return bool(self._state.won)

    def metrics(self) -> dict[str, float]:
        return {"success": float(self.is_won), "score": self._score, **super().metrics()}

    def reference_actions(self) -> list[str]:
        return [self.write_call("act", command=command) for command in self.task.data["commands"]]

    def close(self) -> None:
        self._close_game()
        super().close()

    def _close_game(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None


class TextWorldEnv(TextGameEnv):
    """TextWorld (Côté et al., 2018, arXiv 1806.11532) as an environment.

    Task: reach the objective of a generated text adventure. Tool, rewards and end: see
    `TextGameEnv`. Compiled games are cached in ``$XDG_CACHE_HOME/agent-envs/textworld``
    (``~/.cache``).

    Version history: v0, first version.
    """

    def __init__(
        self,
        *,
        game: str | None = None,
        rooms: int = 3,
        objects: int = 5,
        quest_length: int = 3,
        split: str = "train",
        **shared: Any,
    ) -> None:
        """Choose the family of games.

        Args:
            game: A game file (``.z8``, ``.ulx``) instead of generated games.
            rooms: Rooms of a generated game.
            objects: Objects of a generated game.
            quest_length: Number of commands of its quest.
            split: ``"train"`` or ``"test"``, with different seeds.
            shared: Arguments of `ToolEnv`.
        """
        require_extra("textworld", "AgentR1/TextWorld-v0", "textworld")
        for name, value in (("rooms", rooms), ("objects", objects), ("quest_length", quest_length)):
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}.")
        if game is not None and not Path(game).is_file():
            raise DataError(f"{game}: not a file. Pass the path of a .z8 or .ulx file.")
        self._file, self._split = game, split
        self._sizes = (rooms, objects, quest_length)
        self._split_seed = lookup(_SPLITS, split, kind="split")
        super().__init__(**shared)

    @property
    def num_tasks(self) -> int | None:
        return None if self._file is None else 1

    def get_task(self, index: int) -> Task:
        if self._file is not None:
            return self._begin(Path(self._file), (), f"textworld-{Path(self._file).stem}")
        task_id = "-".join(map(str, ("textworld", *self._sizes, self._split, index)))
        return self._begin(self._make_game(index, task_id), (), task_id)

    def _make_game(self, index: int, task_id: str) -> Path:
        """Return a game that its own solution wins, compiled unless it is cached.

        Some solutions fail: with a chest and a Canadian chest, the interpreter asks which one "take
        latchkey from chest" means.
        """
        import textworld

        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "agent-envs" / "textworld"
        path = folder / f"{task_id}-{textworld.__version__}.z8"
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng([self._split_seed, index])
        for _ in range(_MAX_DRAWS):
            options = textworld.GameOptions()
            options.nb_rooms, options.nb_objects, options.quest_length = self._sizes
            options.seeds = int(generator.integers(2**31 - 1))
            with tempfile.TemporaryDirectory(dir=folder) as scratch, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options.path = str(Path(scratch) / "game.z8")
                textworld.make(options)
                self._repeat(self._begin(Path(options.path), (), task_id).data["commands"])
                if not self.is_won:
                    continue
                # The description first: a game without it has no objective.
                for made in (path.with_suffix(".json"), path):
                    (Path(scratch) / f"game{made.suffix}").replace(made)
                return path
        rooms, objects, quest_length = self._sizes
        raise DataError(
            f"None of {_MAX_DRAWS} games of TextWorld with {rooms} rooms, {objects} objects and "
            f"{quest_length} commands is won by its own solution. Choose other sizes."
        )


class ALFWorldEnv(TextGameEnv):
    """ALFWorld (Shridhar et al., 2021, arXiv 2010.03768), its text version, as an environment.

    Task: a household task, such as to put a clean mug on a shelf. Tool, rewards and end: see
    `TextGameEnv`. Games are those of ``alfworld-download``.

    Version history: v0, first version.
    """

    default_system_prompt = (
        "You are in a house and have a task. Do it by acting, one command after the other, such "
        "as: go to shelf 1, open drawer 2, take mug 1 from shelf 1, clean mug 1 with sinkbasin 1, "
        "move mug 1 to shelf 2, use desklamp 1, look, inventory."
    )
    not_in_snapshots = frozenset({"_games"})
    data_source = "what `alfworld-download` fetches; licence: see its repository"

    def __init__(self, *, data: str | None = None, split: str = "train", **shared: Any) -> None:
        """Find the games.

        Args:
            data: Folder with the splits; ``$ALFWORLD_DATA/json_2.1.1`` by default.
            split: ``"train"``, ``"valid_seen"`` or ``"valid_unseen"``.
            shared: Arguments of `ToolEnv`.
        """
        require_extra("alfworld", "AgentR1/ALFWorld-v0", "alfworld", "textworld")
        base = Path(data) if data else Path(os.environ.get("ALFWORLD_DATA", "")) / "json_2.1.1"
        self._folder = base / split
        self._games = sorted(filter(_is_playable, self._folder.rglob("game.tw-pddl")))
        if not self._games:
            raise DataError(
                f"{self._folder}: no games (game.tw-pddl). Run alfworld-download, and pass "
                "data= or set ALFWORLD_DATA; splits are train, valid_seen, valid_unseen."
            )
        super().__init__(**shared)

    @property
    def num_tasks(self) -> int:
        return len(self._games)

    def get_task(self, index: int) -> Task:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

        path = self._games[index]
        name = path.parent.relative_to(self._folder).as_posix()
        return self._begin(path, [AlfredDemangler()], f"alfworld-{name}")


def _is_playable(path: Path) -> bool:
    """Return whether ALFWorld itself uses a game: solvable, nothing sliced or movable."""
    if "movable" in str(path) or "Sliced" in str(path):
        return False
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("solvable"))
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a game of ALFWorld ({error}). Download it again.") from None


def _readable(feedback: str) -> str:
    """Return the feedback without its status line."""
    return re.sub(r"\n{3,}", "\n\n", _STATUS_LINE.sub("", feedback or "")).strip()
