import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.core.tool_formats import TOOL_FORMATS
from tests.conformance import check_conformance


@pytest.mark.parametrize("env_id", [spec.id for spec in ENVIRONMENTS])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_every_environment_conforms(env_id, tool_format, data_files, request):
    kwargs = {"data": data_files[env_id]} if env_id in data_files else {}
    if env_id in ("AgentR1/ALFWorld-v0", "AgentR1/WebShop-v0"):
        pytest.skip("needs games or a server; see test_text_world and test_web_shop")
    if env_id == "AgentR1/TextWorld-v0":  # to generate a game takes seconds
        kwargs = {"game": request.getfixturevalue("text_world_game")}
    check_conformance(env_id, tool_format=tool_format, **kwargs)


def test_an_id_can_be_made_with_its_module_in_front():
    env = gym.make("agent_envs:AgentR1/SyntheticMultiHop-v0")
    assert env.spec.id == "AgentR1/SyntheticMultiHop-v0"
