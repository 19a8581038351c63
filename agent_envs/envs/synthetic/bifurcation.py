"""A procedural task in which one step decides the outcome: credit assignment in closed form."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolError
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError

MAX_STEPS: Final = 30
RIGHT_DOORS: Final[Mapping[str, str]] = {
    "red": "east",
    "blue": "north",
    "green": "west",
    "white": "south",
}
"""The right door for each sign, the same in all tasks."""
ROOM_TEXT: Final = "Room {number}: {sign}."
KEY_TEXT: Final = " You carry the key."
NO_KEY_TEXT: Final = " Your hands are empty."
END_TEXT: Final = "The end."
_SPLITS: Final = {"train": 0, "test": 1}
_SIGNS: Final = tuple(RIGHT_DOORS)


class SyntheticBifurcationEnv(ToolEnv):
    """Rooms with a sign and four doors; the right door matters in one room only.

    Task: go through `steps` rooms, 2 to 30, and have the key at the end. It is behind the right
    door of one room, which is drawn per task and never shown; all doors of the other rooms are
    harmless. A fixed rule, to be learned from rewards, gives the right door for each sign. From the
    next room on, observations show whether the key was found. Tool: ``choose(door)``. Reward: 1 at
    the end for the key (outcome). The episode ends with the choice in the last room, or without
    the key with an answer. A mistake takes a turn, but leaves the room unchanged. More than 12
    rooms need ``max_episode_steps``.

    The true advantages are known; see `true_advantages`.

    Version history: v0, first version.
    """

    reward_functions = {**noted_terms("key"), "format": format_term}
    default_rewards = {"key": 1.0}
    outcome_terms = frozenset({"key"})
    computes_only = True
    metric_names = ("success", "right_doors", *ToolEnv.metric_names)
    tool_signatures = ("choose(door)",)
    default_system_prompt = "Choose a door in each room. The sign shows which one is right."

    def __init__(
        self, *, steps: int = 8, split: str = "train", parallel_calls: bool = False, **shared: Any
    ) -> None:
        """Choose the family.

        Args:
            steps: Number of rooms.
            split: ``"train"`` or ``"test"``, which share no sequence of signs.
            parallel_calls: Whether a turn may hold several choices, each in the next room.
            shared: Arguments of `ToolEnv`.
        """
        if type(steps) is not int or not 2 <= steps <= MAX_STEPS:
            raise ConfigurationError(f"steps must be 2 to {MAX_STEPS}, not {steps!r}.")
        self._steps, self._split = steps, split
        self._split_seed = lookup(_SPLITS, split, kind="split")
        choose = Tool(self.choose, timeout=None, stateful=True)
        super().__init__(default_tools=[choose], parallel_calls=parallel_calls, **shared)

    def get_task(self, index: int) -> Task:
        rng = np.random.default_rng([self._split_seed, index])
        signs = rng.integers(len(_SIGNS), size=self._steps)
        # The sum of the signs separates the splits, however few the steps are.
        remainder = 0 if self._split == "test" else int(rng.integers(1, len(_SIGNS)))
        signs[-1] = (remainder - signs[:-1].sum()) % len(_SIGNS)
        names = tuple(_SIGNS[sign] for sign in signs)
        decisive = int(rng.integers(self._steps))
        return Task(
            id=f"bifurcation-{self._steps}-{self._split}-{index}",
            question=ROOM_TEXT.format(number=1, sign=names[0]),
            answers=(RIGHT_DOORS[names[decisive]],),
            data={"signs": names, "decisive": decisive},
        )

    def begin_episode(self) -> None:
        self._num_chosen = self._num_right = 0
        self._has_key = False

    def choose(self, door: Literal["north", "east", "south", "west"]) -> str:
        """Go through a door.

        Args:
            door: The door.
        """
        if self.is_finished():  # a later call of the same turn
            raise ToolError(END_TEXT)
        signs, decisive = self.task.data["signs"], self.task.data["decisive"]
        is_right = door == RIGHT_DOORS[signs[self._num_chosen]]
        self._has_key |= is_right and self._num_chosen == decisive
        self._num_right += is_right
        self._num_chosen += 1
        if self.is_finished():
            self.noted["key"] = float(self._has_key)
            return END_TEXT
        room = ROOM_TEXT.format(number=self._num_chosen + 1, sign=signs[self._num_chosen])
        if self._num_chosen <= decisive:
            return room
        return room + (KEY_TEXT if self._has_key else NO_KEY_TEXT)

    def is_finished(self) -> bool:
        return self._num_chosen == self._steps

    def metrics(self) -> dict[str, float]:
        """Return the metrics; ``right_doors`` is the share of right choices so far."""
        success = float(self._has_key and self.is_finished())
        right = self._num_right / max(1, self._num_chosen)
        return {"success": success, "right_doors": right, **super().metrics()}

    def reference_actions(self) -> list[str]:
        return [self.write_call("choose", door=RIGHT_DOORS[s]) for s in self.task.data["signs"]]

    def true_advantages(self, actions: Sequence[str], probability: float) -> list[float]:
        """Return the true advantage of each turn in the current task, shape (S,).

        With ``p`` the policy's probability of the right door in the decisive room, the value
        ``V(s_t)`` is ``p`` up to that room and the outcome, 0 or 1, afterwards. So ``A_t =
        V(s_{t+1}) - V(s_t)`` is ``1 - p`` for the right door there, ``-p`` for another, and 0 in
        all other turns (an answer leads to the value 0). It is exact if ``p`` does not depend on
        the earlier turns, and the turn limit leaves room for mistakes.

        Args:
            actions: Turns from the start of the episode, as `step` takes them.
            probability: ``p``.
        """
        decisive, (right,) = self.task.data["decisive"], self.task.answers
        room, values = 0, [probability]
        for action in actions:
            turn = self._understand(action)
            value = 0.0 if turn.kind == "answer" else values[-1]
            for call in turn.each_call:
                if call.kind == "tool_call" and call.name == "choose":
                    if room == decisive:
                        value = float((call.arguments or {})["door"] == right)
                    room += 1
            values.append(value)
        return [after - before for before, after in itertools.pairwise(values)]
