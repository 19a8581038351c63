"""Which answers may be given to those rules of reasoning-gym that evaluate them as Python.

Nine rules call ``eval``, or SymPy's parser, which does the same, on what a model has answered: it
could run any code, or calculate for hours. What reaches them here is plain: lists of values, or a
small formula.
"""

import ast
from typing import Final

_LISTS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose rule tries an answer as a Python list."""
_FORMULAS: Final = frozenset({
    "coin_flip", "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24",
    "simple_integration",
})  # fmt: skip
"""Tasks whose rule reads an answer as a formula."""
_MAX_CHARS: Final = 20_000
_MAX_FORMULA_CHARS: Final = 1_000
_MAX_NODES: Final = 400
_MAX_NUMBER: Final = 10**12
_MAX_EXPONENT: Final = 20
_FUNCTIONS: Final = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs Rational".split()
)
_PARTS: Final = (
    ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Call, ast.Constant, ast.operator, ast.unaryop,
)  # fmt: skip


def may_be_scored(task: str, answer: str) -> bool:
    """Return whether the rule of a task of reasoning-gym does no harm with an answer."""
    if task in _FORMULAS:
        return len(answer) <= _MAX_FORMULA_CHARS and _is_small_formula(answer)
    return task not in _LISTS or (len(answer) <= _MAX_CHARS and _is_literal_or_no_python(answer))


def _is_literal_or_no_python(answer: str) -> bool:
    try:
        ast.parse(answer.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError):  # as it will be for the rule
        return True
    except (MemoryError, RecursionError):
        return False
    try:
        ast.literal_eval(answer)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_small_formula(answer: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval").body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return len(nodes) <= _MAX_NODES and all(map(_is_plain, nodes))


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
