import asyncio
import time

import pytest

from agent_envs import ConfigurationError, tool


@tool
def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def test_the_schema_comes_from_type_hints_and_docstring():
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second number.", "default": 2},
                },
                "required": ["a"],
            },
        },
    }


def test_wrong_arguments_and_parameters_are_named():
    for arguments, sentence in (
        ({}, "'a' is missing"),
        ({"a": 1, "c": 2}, "'c' is not an argument"),
        ({"a": "one"}, "'a': input should be a valid integer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            add.validate(arguments)

    def untyped(a):
        """Do something."""

    with pytest.raises(ConfigurationError, match="'a' has no type hint"):
        tool(untyped)


def test_a_tool_that_raises_hides_the_exceptions_text_and_a_long_result_is_cut():
    @tool(max_result_chars=100)
    def fail(is_long: bool) -> str:
        """Fail, or say too much."""
        if is_long:
            return "x" * 1000
        raise KeyError("secret")

    assert fail.run(is_long=True).content == "x" * 100 + "\n[cut: 900 more characters]"
    result = fail.run(is_long=False)
    assert result.error == "tool_error"
    assert "secret" not in result.content
    assert "KeyError" in result.content
    assert result.exception == "KeyError: 'secret'"


class PanicError(BaseException):
    """An exception as those of PyO3."""


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, PanicError])
def test_no_exception_of_a_tool_ends_the_step(kind, timeout):
    @tool(timeout=timeout)
    def fail() -> str:
        """Fail."""
        raise kind

    @tool(timeout=timeout)
    async def fail_later() -> str:
        """Fail."""
        raise kind

    for each in (fail, fail_later):
        assert each.run().error == "tool_error"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hanging_tool_times_out(is_async):
    def hang() -> str:
        """Hang."""
        time.sleep(30)
        return ""

    async def hang_async() -> str:
        """Hang."""
        await asyncio.sleep(30)
        return ""

    slow = tool(timeout=0.05)(hang_async if is_async else hang)
    assert slow.run().error == "tool_timeout"
