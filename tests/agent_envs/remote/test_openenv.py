"""OpenEnv's client on our servers; `make test-packages` installs it."""

import gymnasium as gym
import pytest

openenv = pytest.importorskip("openenv.core.generic_client", reason="openenv-core is not installed")

MULTI_HOP = "AgentR1/SyntheticMultiHop-v0"


def test_openenvs_client_runs_an_episode(serve):
    served, env = serve(MULTI_HOP, token="secret"), gym.make(MULTI_HOP)
    observation, _ = env.reset(seed=7)
    url = f"http://user:secret@127.0.0.1:{served.port}"
    with openenv.GenericEnvClient(base_url=url).sync() as client:
        result = client.reset(seed=7, options={"task": None})
        assert (result.observation["text"], result.reward, result.done) == (
            observation,
            None,
            False,
        )
        for action in env.unwrapped.reference_actions():
            observation, reward, terminated, _, info = env.step(action)
            result = client.step({"text": action})
            assert result.observation["text"] == observation
            assert (result.reward, result.done) == (reward, terminated)
            assert result.observation["info"]["reward_terms"] == info["reward_terms"]
        assert client.state()["step_count"] == len(env.unwrapped.reference_actions())
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.step({"message": "x"})
        client.reset(seed=8)
