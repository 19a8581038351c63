import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS
from tests.conformance import check_conformance

ARGUMENTS = {
    "AgentR1/HotpotQA-v0": lambda file: {"data": file},
    "AgentR1/SyntheticMultiHop-v0": lambda file: {},
    "AgentR1/SyntheticLongHorizon-v0": lambda file: {},
}


@pytest.mark.parametrize("env_id", [spec.id for spec in ENVIRONMENTS])
@pytest.mark.parametrize("tool_format", ["hermes", "tags"])
def test_every_environment_conforms(env_id, tool_format, hotpot_file):
    check_conformance(env_id, tool_format=tool_format, **ARGUMENTS[env_id](hotpot_file))


def test_an_id_can_be_made_with_its_module_in_front():
    env = gym.make("agent_envs:AgentR1/SyntheticMultiHop-v0")
    assert env.spec.id == "AgentR1/SyntheticMultiHop-v0"
