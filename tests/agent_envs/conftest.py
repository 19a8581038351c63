"""Every environment, with example data."""

import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.errors import MissingExtraError, SandboxUnavailableError

NEED_MORE = ("AgentR1/ALFWorld-v0", "AgentR1/WebShop-v0")
"""They need games or a server; see test_text_world and test_web_shop."""
ARGUMENTS = {  # the other tasks take many steps, or long ones
    "AgentR1/ScienceWorld-v0": {"task": "find-non-living-thing", "variations": 1}
}


@pytest.fixture(params=[spec.id for spec in ENVIRONMENTS if spec.id not in NEED_MORE])
def example(request, data_files):
    """The id of an environment that this machine offers, and its arguments."""
    env_id = request.param
    kwargs = ARGUMENTS.get(env_id, {})
    if env_id in data_files:
        kwargs = {"data": data_files[env_id]}
    if env_id == "AgentR1/TextWorld-v0":  # to generate a game takes seconds
        kwargs = {"game": request.getfixturevalue("text_world_game")}
    try:
        gym.make(env_id, **kwargs).close()
    except (MissingExtraError, SandboxUnavailableError) as error:
        pytest.skip(str(error))
    return env_id, kwargs
