"""Small worlds of the families whose own data are missing or too large for a tiny policy.

Their tools, observations and rewards are those of the package's environments.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np

from agent_envs import Task, Tool, ToolEnv
from agent_envs.core.rewards import final_metric
from agent_envs.data.files import write_text
from agent_envs.envs.games.text_world_express import TextWorldExpressEnv
from agent_envs.envs.web.web_shop import WebShopEnv, _Page, _read_page, _Shown

_SPLITS: Final = ("train", "test")
_OPERATIONS: Final = ("x + {n}", "x - {n}", "x * {n}", "{n} - x")
_FUNCTIONS: Final = "adjust blend change derive fold mix shift turn".split()
_COLOURS: Final = "black blue brown cream gold green grey pink red silver white yellow".split()
_THINGS: Final = (
    "basket bottle bowl clock cup curtain jar kettle lamp mug pan plate rug vase".split()
)
_OPTIONS: Final = {"size": ("small", "medium", "large"), "finish": ("matte", "glossy")}
_NUM_TEST_GOALS: Final = 200
_NUM_TEST_PROGRAMS: Final = 200
_NUM_TEST_WISHES: Final = 200
_DAYS: Final = "monday tuesday wednesday thursday friday saturday sunday".split()
_TIMES: Final = "noon five six seven eight nine".split()


def write_programs(path: Path, split: str, count: int) -> None:
    """Write rows of MBPP's form; only the tests tell which of four operations is meant.

    The splits share no question: each has names and numbers that the other does not combine. The
    first 200 of the test differ.
    """
    pairs = [(name, n) for name in _FUNCTIONS for n in range(2, 100)]
    order = np.random.default_rng(0).permutation(len(pairs))
    own = order[:_NUM_TEST_PROGRAMS] if split == "test" else order[_NUM_TEST_PROGRAMS:]
    rng = np.random.default_rng(_SPLITS.index(split))
    rows = []
    for number in range(count):
        name, n = pairs[own[number % len(own)] if split == "test" else rng.choice(own)]
        program = str(rng.choice(_OPERATIONS)).format(n=n)
        values = [int(x) for x in rng.choice(np.arange(2, 100), 4, replace=False)]
        rows.append({
            "task_id": f"{split}-{number}",
            "text": f"Write a function {name}(x) that combines x with {n}.",
            "code": f"def {name}(x):\n    return {program}",
            "test_list": [f"assert {name}({x}) == {eval(program, {'x': x})}" for x in values],  # noqa: S307
        })  # fmt: skip
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


class HousesEnv(TextWorldExpressEnv):
    """TextWorld Common Sense with its last 200 houses as the split ``"test"``.

    The package's own test split has other objects, whose words a tiny policy does not know.
    """

    def __init__(self, *, split: str = "train", **shared: Any) -> None:
        """Choose the houses."""
        self._first, self._number = {"train": (0, 800), "test": (800, 200)}[split]
        super().__init__(game="twc", **shared)

    @property
    def num_tasks(self) -> int:
        """Number of houses."""
        return self._number

    def get_task(self, index: int) -> Task:
        """Return a house of the split."""
        return super().get_task(self._first + index)


class ShopEnv(WebShopEnv):
    """WebShop's actions, pages and score, over a procedural catalogue instead of a server."""

    computes_only = True

    def get_task(self, index: int) -> Task:
        """Return a goal; those of the split for tests are in no other."""
        goals = [
            (colour, thing, size, finish)
            for colour in _COLOURS for thing in _THINGS
            for size in _OPTIONS["size"] for finish in _OPTIONS["finish"]
        ]  # fmt: skip
        order, number = np.random.default_rng(0).permutation(len(goals)), self._goals[index]
        others = _NUM_TEST_GOALS + number % (len(goals) - _NUM_TEST_GOALS)
        self._goal = goals[order[number % _NUM_TEST_GOALS if number < 500 else others]]
        colour, thing = self._goal[:2]
        alike = [f"{c} {t}" for c in _COLOURS for t in _THINGS if (c == colour) != (t == thing)]
        rng = np.random.default_rng([1, number])
        shown = rng.permutation([f"{colour} {thing}", *rng.choice(alike, 5, replace=False)])
        self._products = {f"B{_product(name):03}": str(name) for name in shown}
        return super().get_task(index)

    def reference_actions(self) -> list[str]:
        """Search, choose product and options, and buy."""
        colour, thing, size, finish = self._goal
        wanted = f"{colour} {thing}"
        buttons = [f"B{_product(wanted):03}", size, finish, "Buy Now"]
        search = self.write_call("search", keywords=wanted)
        return [search, *(self.write_call("click", button=button) for button in buttons)]

    def _fetch(self, page: _Page) -> _Shown:
        return _read_page(getattr(self, f"_write_{page.kind}")(page), page)

    def _write_index(self, page: _Page) -> str:
        colour, thing, size, finish = self._goal
        goal = f"Instruction: buy a {colour} {thing}, {size}, {finish}"
        return f"<h4>{goal}</h4><button>Search</button>"

    def _write_results(self, page: _Page) -> str:
        words = set(page.query.lower().split())
        found = {k: name for k, name in self._products.items() if words & set(name.split())}
        links = [f'<a class="product-link">{k}</a><p>{name}</p>' for k, name in found.items()]
        return "".join(["<button>Back to Search</button>", *(links if page.number == 1 else ())])

    def _write_item(self, page: _Page) -> str:
        labels = [
            f"<h4>{kind}</h4>" + "".join(f"<label>{value}</label>" for value in values)
            for kind, values in _OPTIONS.items()
        ]
        name = self._products[page.item]
        buttons = ("Back to Search", "< Prev", "Buy Now")
        return "".join([*(f"<button>{b}</button>" for b in buttons), f"<h2>{name}</h2>", *labels])

    def _write_done(self, page: _Page) -> str:
        bought = [*self._products[page.item].split(), *map(dict(page.options).get, _OPTIONS)]
        score = sum(a == b for a, b in zip(bought, self._goal, strict=True)) / len(bought)
        return f"<h3>Your score (min 0.0, max 1.0)</h3><pre>{score}</pre>"


class BookingEnv(ToolEnv):
    """A guest wants a table, says only what is asked for, and may change the day in the end."""

    reward_functions: ClassVar = {"booked": final_metric("success")}
    default_rewards: ClassVar = {"booked": 1.0}
    outcome_terms = frozenset({"booked"})
    computes_only = True
    tool_signatures = ("book(day, time, people)",)
    default_system_prompt = "You take bookings for a restaurant. Ask whether all is right, too."

    def __init__(self, *, split: str = "train", **shared: Any) -> None:
        """Choose the split, ``"train"`` or ``"test"``."""
        self._split = _SPLITS.index(split)
        super().__init__(default_tools=[Tool(self.book, timeout=None)], **shared)

    def get_task(self, index: int) -> Task:
        """Return a wish of the split, and draw the day that the guest names first."""
        shape = (len(_DAYS), len(_TIMES), 8)
        order = np.random.default_rng(0).permutation(np.prod(shape))
        is_test = self._split == _SPLITS.index("test")
        own = order[:_NUM_TEST_WISHES] if is_test else order[_NUM_TEST_WISHES:]
        day, time, people = (int(i) for i in np.unravel_index(own[index % len(own)], shape))
        wish = {"day": _DAYS[day], "time": _TIMES[time], "people": 2 + people}
        rng = np.random.default_rng([self._split, index])
        others = [name for name in _DAYS if name != wish["day"]]
        first = str(rng.choice(others)) if rng.random() < 0.5 else wish["day"]
        return Task(
            id=f"table-{self._split}-{index}", question="Hello, I need a table.", answers=(),
            data={"wish": wish, "first_day": first},
        )  # fmt: skip

    def begin_episode(self) -> None:
        """Forget the last guest."""
        self._booked: dict[str, Any] | None = None

    def book(self, day: str, time: str, people: int) -> str:
        """Book a table; again to change the booking.

        Args:
            day: The day of the week.
            time: When the guests come.
            people: How many.
        """
        self._booked = {"day": day, "time": time, "people": people}
        return "Booked."

    def on_message(self, message: str) -> str:
        """Reply as the guest."""
        wish, first = self.task.data["wish"], self.task.data["first_day"]
        words = message.lower()
        if "right" in words:
            return "Yes." if first == wish["day"] else f"No, better on {wish['day']}."
        replies = {"day": first, "time": wish["time"], "people": wish["people"]}
        return next((f"{v}, please." for k, v in replies.items() if k in words), "Pardon?")

    def metrics(self) -> dict[str, float]:
        """Return the metrics."""
        return {"success": float(self._booked == self.task.data["wish"]), **super().metrics()}

    def reference_actions(self) -> list[str]:
        """Ask for everything, ask whether it is right, and book."""
        asked = [f"What {name}?" for name in ("day", "time")]
        call = self.write_call("book", **self.task.data["wish"])
        return [*asked, "How many people?", "Is that right?", call, self.write_answer("done")]


def _product(name: str) -> int:
    colour, thing = str(name).split()
    return _COLOURS.index(colour) * len(_THINGS) + _THINGS.index(thing)


for _id, _env, _turns in (
    ("Houses", HousesEnv, 10), ("Shop", ShopEnv, 8), ("Booking", BookingEnv, 8),
):  # fmt: skip
    gym.register(f"Benchmarks/{_id}-v0", f"{__name__}:{_env.__name__}", max_episode_steps=_turns)
