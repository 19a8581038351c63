"""A calculator: one arithmetic expression, evaluated safely."""

import math
import re
from typing import Any, Final

from agent_envs.core.tool import Tool, ToolError

SIGNIFICANT_DIGITS: Final = 12
_FUNCTIONS: Final = {
    "sqrt": math.sqrt, "abs": abs, "min": min, "max": max, "round": round, "floor": math.floor,
    "ceil": math.ceil, "log": math.log, "log10": math.log10, "exp": math.exp, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "gcd": math.gcd,
}  # fmt: skip
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NAMES: Final = {"pi": math.pi, "e": math.e}


def make_calculator_tool() -> Tool:
    """Make the tool ``calculator(expression)``, on the library simpleeval."""

    def calculator(expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: For example "(3 + 4) * 2 / sqrt(9)"; ** is the power.
        """
        from simpleeval import InvalidExpression, SimpleEval

        evaluator = SimpleEval(functions=dict(_FUNCTIONS), names=dict(_NAMES))
        try:
            value = evaluator.eval(_THOUSANDS.sub("", expression))
        except (InvalidExpression, SyntaxError, ArithmeticError, ValueError, TypeError) as error:
            raise ToolError(f"{expression!r} cannot be calculated: {error}.") from None
        return _as_text(value)

    # simpleeval bounds what an expression may cost, so no thread of its own.
    return Tool(calculator, timeout=None)


def _as_text(value: Any) -> str:
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.{SIGNIFICANT_DIGITS}g}"
    raise ToolError("The value is no number.")
