"""Procedural chains of calls: arithmetic, one operation at a time, and table look-ups."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import Progress, correct_term, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolError, ToolResult, quoted
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.formats.tool_formats import ParsedAction
from agent_envs.scoring import exact_match

_SPLITS: Final = {"train": 0, "test": 1}
_OPERATIONS: Final[Mapping[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_ITEMS: Final = "anvil basket candle drum easel funnel globe hammer ink jar kettle lamp".split()
_MAKERS: Final = "arden brandt castell dorn ekberg falk garnier holm".split()
_CITIES: Final = "altona bergen cadiz delft evora fulda ghent havre".split()
_COUNTRIES: Final = "arland borania cestia dalmor elvany".split()


class Step(NamedTuple):
    """A call of the solution."""

    tool: str
    arguments: Mapping[str, Any]
    result: str


class SyntheticToolEnv(ToolEnv):
    """Procedural tasks that need several calls, each of which uses the previous result.

    Reward terms: ``exact_match`` at the end (outcome); ``new_value`` (the share of the intermediate
    values that the step found first; a right answer earns the rest) and ``format`` on the way
    (process). The episode ends with an answer.
    """

    reward_functions = {
        "exact_match": correct_term,
        **noted_terms("new_value"),
        "format": format_term,
    }
    default_rewards = {"exact_match": 1.0, "new_value": 0.2}
    computes_only = True
    outcome_terms = frozenset({"exact_match"})
    metric_names = ("success", "value_recall", *ToolEnv.metric_names)
    max_steps: ClassVar[int]
    _call: Callable[..., str]
    """The family's tool."""

    def __init__(self, *, steps: int = 2, split: str = "train", **shared: Any) -> None:
        """Choose the family.

        Args:
            steps: Number of calls that lead to the answer.
            split: ``"train"`` or ``"test"``, which share no task.
            shared: Arguments of `ToolEnv`.
        """
        if steps not in range(1, self.max_steps + 1):
            raise ConfigurationError(f"steps must be 1 to {self.max_steps}, not {steps}.")
        self._steps, self._split = steps, split
        self._split_seed = lookup(_SPLITS, split, kind="split")
        super().__init__(default_tools=[Tool(self._call, timeout=None)], **shared)

    def _make_task(self, rng: np.random.Generator) -> tuple[str, Sequence[Step], Any]:
        """Return question, calls (the last result is the answer), and data of the tool."""
        raise NotImplementedError

    def get_task(self, index: int) -> Task:
        rng = np.random.default_rng([self._split_seed, index])
        question, steps, world = self._make_task(rng)
        return Task(
            id=f"{type(self).__name__}-{self._steps}-{self._split}-{index}",
            question=question,
            answers=(steps[-1].result,),
            data={"steps": steps, "world": world},
        )

    def begin_episode(self) -> None:
        self._wanted = {step.result for step in self.task.data["steps"]}
        self._found: set[str] = set()
        self._progress = Progress()
        self.is_correct = False

    def on_result(self, action: ParsedAction, result: ToolResult) -> None:
        if action.name == self._call.__name__:
            self._found |= {result.content} & self._wanted
        self.noted["new_value"] += self._progress.advance(len(self._found) / len(self._wanted))

    def on_answer(self, answer: str) -> None:
        self.is_correct = exact_match(answer, self.task.answers) == 1.0
        if self.is_correct:
            self.noted["new_value"] += self._progress.advance(1.0)

    def metrics(self) -> dict[str, float]:
        recall = len(self._found) / len(self._wanted)
        return {"success": float(self.is_correct), "value_recall": recall, **super().metrics()}

    def reference_actions(self) -> list[str]:
        steps = self.task.data["steps"]
        calls = [self.write_call(step.tool, **step.arguments) for step in steps]
        return [*calls, self.write_answer(self.task.answers[0])]


class SyntheticArithmeticEnv(SyntheticToolEnv):
    """Arithmetic with whole numbers, one operation at a time.

    Task: the value of an expression with `steps` operations, 1 to 8. Tool: ``calculate(a,
    operation, b)``. Rewards and end: see `SyntheticToolEnv`.

    Version history: v0, first version.
    """

    max_steps = 8
    tool_signatures = ("calculate(a, operation, b)",)
    default_system_prompt = (
        "Calculate the value, one operation after the other; then answer with the number alone."
    )

    def calculate(self, a: int, operation: Literal["+", "-", "*"], b: int) -> str:
        """Calculate with two whole numbers.

        Args:
            a: The first number.
            operation: What to do with them.
            b: The second number.
        """
        if max(abs(a), abs(b)) > 10**12:
            raise ToolError("The numbers are too large.")
        return str(_OPERATIONS[operation](a, b))

    _call = calculate

    def _make_task(self, rng: np.random.Generator) -> tuple[str, Sequence[Step], Any]:
        value = int(rng.integers(2, 100))
        text, steps = str(value), []
        for number in range(self._steps):
            operation = str(rng.choice(list(_OPERATIONS)))
            other = int(rng.integers(2, 10 if operation == "*" else 100))
            arguments = {"a": value, "operation": operation, "b": other}
            value = _OPERATIONS[operation](value, other)
            steps.append(Step("calculate", arguments, str(value)))
            text = f"{f'({text})' if number else text} {operation} {other}"
        return f"What is {text}?", steps, None


class SyntheticTableEnv(SyntheticToolEnv):
    """Look-ups in tables that refer to each other.

    Task: follow `steps` references, 1 to 3: an item's maker, the maker's city, the city's country.
    Tool: ``look_up(table, key)``. Rewards and end: see `SyntheticToolEnv`.

    Version history: v0, first version.
    """

    max_steps = 3
    tool_signatures = ("look_up(table, key)",)
    default_system_prompt = (
        "Answer the question with look-ups in the tables, one after the other: the table 'maker' "
        "has the maker of each item, 'city' the city of each maker, 'country' the country of each "
        "city."
    )

    def look_up(self, table: Literal["maker", "city", "country"], key: str) -> str:
        """Look up what a table has under a key.

        Args:
            table: Which table.
            key: The item, the maker or the city.
        """
        tables: Mapping[str, Mapping[str, str]] = self.task.data["world"]
        value = tables[table].get(" ".join(key.split()).lower())
        if value is None:
            raise ToolError(f"The table {table!r} has no key {quoted(key)}.")
        return value

    _call = look_up

    def _make_task(self, rng: np.random.Generator) -> tuple[str, Sequence[Step], Any]:
        tables = {
            "maker": {item: str(rng.choice(_MAKERS)) for item in _ITEMS},
            "city": {maker: str(rng.choice(_CITIES)) for maker in _MAKERS},
            "country": {city: str(rng.choice(_COUNTRIES)) for city in _CITIES},
        }
        key = str(rng.choice(_ITEMS))
        text, steps = f"the {key}", []
        for table in list(tables)[: self._steps]:
            arguments, key = {"table": table, "key": key}, tables[table][key]
            steps.append(Step("look_up", arguments, key))
            text = f"the {table} of {text}"
        return f"What is {text}?", steps, tables
