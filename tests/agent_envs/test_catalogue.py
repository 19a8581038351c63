from pathlib import Path

import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.catalogue import make_page
from agent_envs.errors import MissingExtraError, SandboxUnavailableError

PAGE = Path(__file__).parents[2] / "ENVIRONMENTS.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page == make_page(), "run: python -m agent_envs list > ENVIRONMENTS.md"


def check_declarations(env):
    """Compare the declarations of a class with an environment."""
    env.reset(seed=0)
    kind, *_, info = type(env.unwrapped), *env.step("")
    functions = [entry["function"] for entry in info["tools"]]
    if env.spec.id != "AgentR1/BFCL-v0":  # there, each task has its own functions
        assert kind.tool_signatures == tuple(
            f"{function['name']}({', '.join(function['parameters']['properties'])})"
            for function in functions
        )
    assert kind.optional_tool_names == tuple(env.unwrapped.optional_tools)
    assert set(kind.metric_names) == set(info["metrics"])


@pytest.mark.parametrize("env_id", [spec.id for spec in ENVIRONMENTS])
def test_declarations_match_the_environment(env_id, data_files, request):
    kwargs = {"data": data_files[env_id]} if env_id in data_files else {}
    if env_id in ("AgentR1/ALFWorld-v0", "AgentR1/WebShop-v0"):
        pytest.skip("needs games or a server; see test_text_world and test_web_shop")
    if env_id == "AgentR1/TextWorld-v0":
        kwargs = {"game": request.getfixturevalue("text_world_game")}
    try:
        env = gym.make(env_id, **kwargs)
    except (MissingExtraError, SandboxUnavailableError) as error:
        pytest.skip(str(error))
    check_declarations(env)
