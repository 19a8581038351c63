"""The calculator is fast, brief and right on any input."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.tools.calculator import MAX_CHARS, make_calculator_tool

CALCULATOR = make_calculator_tool()
SECONDS = 2.0
"""Generous: unbounded operations take minutes."""


def calculate(expression):
    start = time.process_time()
    result = CALCULATOR.run(expression=expression)
    assert time.process_time() - start < SECONDS
    assert result.exception is None or result.exception.startswith("ToolError")
    return result


@pytest.mark.parametrize(
    "expression",
    [
        "3999999**3999999", "3**3999999 // 7**1999999", "9**9**9**9", "(9**999)**(9**999)",
        "1<<999999999", "round(5, -99999999999)", "10**9**2**9", "-" * 1_000 + "1",
        "(" * 1_000, "'a' * 10**9", "'a'.ljust(10**9)", "f'{1:>999999999}'", "[1] * 10**9",
        "'%999999999d' % 5", "1e999", "exp(exp(exp(9)))", "(-8)**(1/3)", "5 .real", "lambda: 1",
        "9**9999", "0x" + "f" * 3_000, "\x00", "\ud800", "()", "min()", "gcd(1.5, 2)", "e.real",
        "9" * 100_000, "(" * 100_000, "1+" * 50_000,
    ],
)  # fmt: skip
def test_large_values_and_other_code_are_refused_quickly(expression):
    result = calculate(expression)
    assert result.error == "tool_error"
    assert len(result.content) < 500


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 ** 64", "18446744073709551616"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("2 ** -1", "0.5"),
        ("round(2.567, 2)", "2.57"), ("gcd(12, 18)", "6"), ("1,234,567 + 1", "1234568"),
        ("3 < 4", "True"), ("sqrt(2) ** 2", "2"), ("log(e) + cos(pi)", "0"), (" 1 ", "1"),
        ("(-1) ** 99999999999", "-1"), ("0.5 ** 5", "0.03125"), ("max(3, 9 ** 2)", "81"),
    ],
)  # fmt: skip
def test_arithmetic_is_calculated(expression, value):
    assert calculate(expression).content == value


_EXPRESSIONS = st.recursive(
    st.integers(0, 10**30).map(str) | st.floats(0, 1e300).map(repr) | st.sampled_from(["pi", "e"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+ - * / // % ** <".split()), inner).map(" ".join)
        | st.tuples(st.sampled_from("sqrt exp round floor gcd -".split()), inner).map(
            lambda pair: f"{pair[0]}({pair[1]})"
        )
        | inner.map(lambda text: f"({text})")
    ),
    max_leaves=40,
)


@given(_EXPRESSIONS | st.text(alphabet="0123456789.*+-/%()<>=e, '[]x_!&|^~", max_size=MAX_CHARS))
@settings(max_examples=80, deadline=None)
def test_any_expression_ends_quickly(expression):
    calculate(expression)
