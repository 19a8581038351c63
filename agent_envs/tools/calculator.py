"""A calculator for arithmetic expressions.

Only numbers and the operators and functions of the tables below are evaluated. Expressions have at
most `MAX_CHARS` characters and intermediate values at most `MAX_BITS` bits, which is checked before
operations that could exceed it, so an expression takes milliseconds.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Final

from agent_envs.core.tool import Tool, ToolError, quoted

SIGNIFICANT_DIGITS: Final = 12
MAX_CHARS: Final = 2_000
MAX_BITS: Final = 4_000
"""Of an integer, about 1,200 digits."""
TOO_LONG_TEXT: Final = "The expression is too long: {length} characters; {limit} are allowed."
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NAMES: Final = {"pi": math.pi, "e": math.e}

Number = int | float


class _Refused(Exception):
    """An expression has no value; the message is the reason."""


def make_calculator_tool() -> Tool:
    """Make the tool ``calculator(expression)``."""

    def calculator(expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: For example "(3 + 4) * 2 / sqrt(9)"; ** is the power.
        """
        if len(expression) > MAX_CHARS:
            raise ToolError(TOO_LONG_TEXT.format(length=len(expression), limit=MAX_CHARS))
        try:
            value = _value(ast.parse(_THOUSANDS.sub("", expression.strip()), mode="eval").body)
            return str(value) if isinstance(value, int) else f"{value:.{SIGNIFICANT_DIGITS}g}"
        except (MemoryError, RecursionError):
            error: object = "it is nested too deeply"
        except SyntaxError as raised:
            error = raised.msg
        except (_Refused, ArithmeticError, ValueError, TypeError) as raised:
            error = raised
        raise ToolError(f"{quoted(expression)} cannot be calculated: {error}.")

    return Tool(calculator, timeout=None)  # the cost of an expression is bounded


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
        case ast.Compare(ops=[comparison]) if type(comparison) in _OPERATORS:
            right = _value(node.comparators[0])
            return _OPERATORS[type(comparison)](_value(node.left), right)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, node.args)))
    raise _Refused(f"{quoted(ast.unparse(node))} is no number, operator or function that it knows")


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() <= MAX_BITS:
            return value
    elif isinstance(value, float) and math.isfinite(value):
        return value
    raise _Refused("a value on the way is too large, or no real number")


def _power(base: Number, exponent: Number) -> Number:
    # |base| >= 2 ** (bits - 1), so the result has less than twice as many bits as are allowed.
    bits = base.bit_length() if isinstance(base, int) else 1  # the power of a float is bounded
    if isinstance(exponent, int) and (bits - 1) * exponent > MAX_BITS:
        raise _Refused("the power is too large")
    result: Number = base**exponent
    return result


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MAX_BITS:
        raise _Refused("round takes a number and how many digits to keep")
    return round(value, digits) if digits else round(value)


_OPERATORS: Final[Mapping[type[ast.AST], Callable[..., Number]]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Pow: _power,
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Final[Mapping[str, Callable[..., Number]]] = {
    "sqrt": math.sqrt, "abs": abs, "min": min, "max": max, "round": _round, "floor": math.floor,
    "ceil": math.ceil, "log": math.log, "log10": math.log10, "exp": math.exp, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "gcd": math.gcd,
}  # fmt: skip
