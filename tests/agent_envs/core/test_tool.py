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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "'a' is missing"),
        ({"a": 1, "c": 2}, "'c' is not an argument of this tool"),
        (
            {"a": "one"},
            "'a': input should be a valid integer, unable to parse string as an integer",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, sentence):
    with pytest.raises(ValueError, match="'") as error:
        add.validate(arguments)
    assert str(error.value) == sentence


def test_a_tool_that_raises_is_a_result_that_hides_the_exceptions_text():
    @tool
    def fail() -> str:
        """Fail."""
        raise KeyError("secret")

    result = fail.run()
    assert result.error == "tool_error"
    assert "secret" not in result.content
    assert "KeyError" in result.content
    assert result.exception == "KeyError: 'secret'"


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
    started = time.monotonic()
    assert slow.run().error == "tool_timeout"
    assert time.monotonic() - started < 5


def test_a_long_result_is_cut():
    @tool(max_result_chars=10)
    def flood() -> str:
        """Say too much."""
        return "x" * 1000

    assert flood.run().content == "x" * 10 + "\n[cut: 990 more characters]"


def test_a_parameter_without_a_type_hint_is_refused():
    def untyped(a):
        """Do something."""

    with pytest.raises(ConfigurationError, match="'a' has no type hint"):
        tool(untyped)
