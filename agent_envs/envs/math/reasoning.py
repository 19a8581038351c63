"""Tasks of the library reasoning-gym, endless and scored by their own rules."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.own_random import OwnRandom
from agent_envs.core.rewards import SCORE, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool_env import ENDLESS, ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.math_answers import MathJudge
from agent_envs.tools.calculator import make_calculator_tool

_SPLIT_SEEDS: Final = {"train": 1, "test": 2}
_EAGER: Final = frozenset({"acre", "composite", "gsm_symbolic", "list_functions", "word_ladder"})
"""Tasks that draw all questions at once or refuse large sizes: each question gets its own small
data set."""
_EAGER_SIZE: Final = 10
_REFUSED: Final = {
    "coin_flip": "the library's rule gives the answer '0' a full score",
    "game_of_life_halting": "the library's rule gives any answer a full score",
    "propositional_logic": "the library's rule gives a premise of the question a full score",
    "puzzle24": "the library's rule ignores the numbers of the question",
}
_LISTS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose rule evaluates an answer as a Python list."""
_FORMULAS: Final = frozenset({
    "countdown", "intermediate_integration", "polynomial_multiplication", "simple_integration",
})  # fmt: skip
"""Tasks whose rule evaluates an answer as a formula."""
_SLOW: Final = _FORMULAS | {"rubiks_cube", "rush_hour"}
"""Tasks whose rule may compute for hours with an answer, such as ``F999999999``."""
_FLOATS: Final = frozenset({"complex_arithmetic", "number_sorting"})
"""Tasks whose rule gives NaN a full score."""
_JUDGE: Final = MathJudge()
_MAX_CHARS: Final = 20_000
_MAX_FORMULA_CHARS: Final = 1_000
_MAX_NODES: Final = 400
_MAX_NUMBER: Final = 10**12
_MAX_EXPONENT: Final = 20
_MAX_POWERS: Final = 2
_FUNCTIONS: Final = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs Rational".split()
)
_PARTS: Final = (
    ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Call, ast.Constant, ast.operator, ast.unaryop,
)  # fmt: skip


class ReasoningGymEnv(ToolEnv):
    """A task of reasoning-gym (Stojanovski et al., 2025, arXiv 2505.24760) as an environment.

    Task: answer a generated question; about a hundred kinds, by `task`: all of the library but
    ``coin_flip``, ``game_of_life_halting``, ``propositional_logic`` and ``puzzle24``, whose rules
    give worthless answers a full score. Tools: none, or the ``calculator`` with
    ``tools=["calculator"]``. Reward terms: ``score`` at the end (outcome), the task's own rule, 0
    if it takes too long; ``format`` on the way (process). Success is a full score. The episode ends
    with an answer.

    Version history: v0, first version.
    """

    reward_functions = {**noted_terms("score"), "format": format_term}
    # A mistake costs a turn only: another price could bring a solution below a score near to 1.
    default_rewards = {"score": 1.0}
    term_earnings = {"score": SCORE}
    outcome_terms = frozenset({"score"})
    optional_tool_names = ("calculator",)
    metric_names = ("success", "score", *ToolEnv.metric_names)
    not_in_snapshots = frozenset({"_build", "_config", "_dataset"})
    default_system_prompt = "Answer the question; give the answer alone."

    def __init__(
        self,
        *,
        task: str = "leg_counting",
        task_kwargs: Mapping[str, Any] | None = None,
        split: str = "train",
        **shared: Any,
    ) -> None:
        """Choose the task.

        Args:
            task: Its name in reasoning-gym.
            task_kwargs: Its configuration, such as ``{"max_animals": 5}``.
            split: ``"train"`` or ``"test"``, drawn by different seeds.
            shared: Arguments of every tool environment; see `ToolEnv`.
        """
        require_extra("math", "AgentR1/ReasoningGym-v0", "reasoning_gym")
        from reasoning_gym.factory import DATASETS

        self._build, config = lookup(DATASETS, task, kind="reasoning-gym task")
        if task in _REFUSED:
            raise ConfigurationError(f"reasoning-gym's {task!r} is not offered: {_REFUSED[task]}.")
        self._name, self._split = task, split
        seed = lookup(_SPLIT_SEEDS, split, kind="split")
        size = _EAGER_SIZE if task in _EAGER else ENDLESS
        try:
            self._config = config(seed=seed, size=size, **(task_kwargs or {}))
            if hasattr(self._config, "validate"):
                self._config.validate()
        except (TypeError, AssertionError, AttributeError, ValueError) as error:
            raise ConfigurationError(f"task_kwargs of {task!r}: {error}.") from None
        self._dataset = self._build(self._config)
        super().__init__(optional_tools={"calculator": [make_calculator_tool()]}, **shared)

    def get_task(self, index: int) -> Task:
        seed = int(np.random.default_rng([self._config.seed, index]).integers(ENDLESS))
        with OwnRandom().installed(seed):  # some tasks draw from the global generators
            if self._name in _EAGER:
                dataset = self._build(dataclasses.replace(self._config, seed=seed))
                entry = dict(dataset[seed % _EAGER_SIZE])
            else:
                entry = self._dataset[seed]
        answer = entry["answer"]
        return Task(
            id=f"{self._name}-{self._split}-{index}",
            question=entry["question"],
            answers=() if answer is None else (str(answer),),
            data={"entry": entry},
        )

    def begin_episode(self) -> None:
        self.score = 0.0

    def on_answer(self, answer: str) -> None:
        if answer not in self.task.answers and not may_be_scored(self._name, answer):
            self.noted["score"] = 0.0
            return
        rule, entry = self._dataset.score_answer, self.task.data["entry"]
        try:
            if self._name in _SLOW:
                score = _JUDGE.score(rule, answer=answer, entry=entry)
            else:
                score = rule(answer=answer, entry=entry)
        except Exception:  # noqa: BLE001 - a scorer that fails on a model's answer
            score = 0.0
        self.score = self.noted["score"] = min(1.0, max(0.0, float(score)))

    def metrics(self) -> dict[str, float]:
        return {"success": float(self.score == 1.0), "score": self.score, **super().metrics()}

    def reference_actions(self) -> list[str]:
        if not self.task.answers:
            raise NotImplementedError(f"reasoning-gym has no reference answer for {self._name}.")
        return [self.write_answer(self.task.answers[0])]


def may_be_scored(task: str, answer: str) -> bool:
    """Return whether the rule of a task is safe with an answer.

    Eight rules call ``eval``, or SymPy's parser, which does the same, on the answer of a model: it
    could run any code. They get lists of values and small formulas only. Two would accept NaN.
    """
    if task in _FLOATS:
        return "nan" not in "".join(answer.lower().split())
    if task in _FORMULAS:
        return len(answer) <= _MAX_FORMULA_CHARS and _is_small_formula(answer)
    return task not in _LISTS or (len(answer) <= _MAX_CHARS and _is_literal_or_no_python(answer))


def _is_literal_or_no_python(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except SyntaxError:  # as it will be for the rule
        return True
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_small_formula(answer: str) -> bool:
    try:
        formula = ast.parse(answer.strip(), mode="eval").body
        nodes = list(ast.walk(formula))
        is_small = len(nodes) <= _MAX_NODES and _power_depth(formula) <= _MAX_POWERS
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return is_small and all(map(_is_plain, nodes))


def _power_depth(node: ast.AST) -> int:
    """Return how many powers are nested: each multiplies the digits of its base."""
    deepest = max(map(_power_depth, ast.iter_child_nodes(node)), default=0)
    return deepest + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        value = node.value
        return isinstance(value, int | float) and abs(value) <= _MAX_NUMBER
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in _FUNCTIONS or node.id in ("pi", "theta", "alpha")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return all(map(_is_small_exponent, ast.walk(node.right)))
    return isinstance(node, _PARTS) and not isinstance(node, ast.LShift | ast.RShift)


def _is_small_exponent(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and abs(node.value) <= _MAX_EXPONENT
    return not isinstance(node, ast.Pow | ast.Mult | ast.Call)
