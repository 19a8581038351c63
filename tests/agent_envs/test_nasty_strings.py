"""Every built-in tool and scorer answers 100 kB of anything in linear time, and in few words."""

import time

import gymnasium as gym
import pytest

from agent_envs.formats.actions import example_arguments
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.scoring import exact_match, f1, normalize_answer, squad_f1
from agent_envs.scoring.math_answers import gsm8k_match, last_boxed, math_equal

LENGTH = 100_000
SECONDS = 5.0
"""Of this process; a quadratic or unbounded one takes minutes. Each takes milliseconds."""
PIECES = (
    "a", "a ", "9", "9,", "1.", "**", "$", "`", "(", "{", "[", "\\", "\n", " ", "the ", "#### ",
    "\\boxed{", "\\text{", "\\text ", "\\begin{a}", "\ufdfa", "\u0130", "\x00", "\ud800", "*a ",
    "<b>", "\u0301\u0327", "| ", "==", "x**", "{}", '"', "\\frac 1", "$1$", "[1] ",
)  # fmt: skip
STRINGS = [(piece * LENGTH)[:LENGTH] for piece in PIECES]
SCORERS = {
    "normalize_answer": normalize_answer,
    "exact_match": lambda text: exact_match(text, ["a"] * 50),
    "f1": lambda text: f1(text, ["a b"] * 50),
    "squad_f1": lambda text: squad_f1(text, ["a b"] * 50),
    "math_equal": lambda text: math_equal(text, "5"),
    "math_equal, 1,000 characters": lambda text: math_equal(text[:900] + " 5 6", "5"),
    "gsm8k_match": lambda text: gsm8k_match(text, "5"),
    "last_boxed": last_boxed,
}


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_takes_linear_time(name):
    pytest.importorskip("math_verify")
    for text in STRINGS:
        start = time.process_time()
        SCORERS[name](text)
        assert time.process_time() - start < SECONDS, text[:20]


def test_nested_boxes_take_linear_time():
    pytest.importorskip("math_verify")
    start = time.process_time()
    math_equal("\\boxed{" * 2_400 + "5" + "}" * 2_400, "5")
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("piece", ["<answer></think>", "<tool_call></think>", "<search></think>"])
def test_a_format_takes_linear_time(name, piece):
    tools = gym.make("AgentR1/SyntheticMultiHop-v0").unwrapped.tools
    start = time.process_time()
    TOOL_FORMATS[name].parse(piece * 40_000 + "</answer>", tools)
    assert time.process_time() - start < SECONDS


def test_a_tool_takes_linear_time_and_says_little(example):
    env_id, kwargs = example
    if env_id in ("AgentR1/HumanEval-v0", "AgentR1/MBPP-v0", "AgentR1/CommandLine-v0"):
        pytest.skip("its tools are programs in a sandbox, which has limits of its own")
    optional = gym.make(env_id, **kwargs).unwrapped.optional_tool_names
    names = [name for name in optional if name != "python"]
    env = gym.make(env_id, **kwargs, tools=names, max_episode_steps=-1)
    env.reset(seed=0)
    for tool in env.unwrapped.tools.values():
        properties = tool.parameters["properties"]
        texts = [n for n in example_arguments(tool) if properties[n].get("type") == "string"]
        for text in STRINGS if texts else ():
            arguments = dict.fromkeys(example_arguments(tool), 1) | dict.fromkeys(texts, text)
            start = time.process_time()
            result = tool.run(**arguments)
            assert time.process_time() - start < SECONDS, (tool.name, text[:20])
            assert len(result.content) < tool.max_result_chars + 100
            if result.error is not None:
                assert len(result.content) < 1_000
