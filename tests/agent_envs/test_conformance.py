import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS, Task, Tool, ToolEnv
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_envs.testing import ConformanceError, check, run_checks
from agent_envs.testing.checks import CHECKS
from agent_envs.testing.episodes import TextEnv


@pytest.mark.parametrize("env_id", [spec.id for spec in ENVIRONMENTS])
def test_every_environment_conforms(env_id, data_files, request):
    kwargs = {"data": data_files[env_id]} if env_id in data_files else {}
    if env_id in ("AgentR1/ALFWorld-v0", "AgentR1/WebShop-v0"):
        pytest.skip("needs games or a server; see test_text_world and test_web_shop")
    if env_id == "AgentR1/TextWorld-v0":  # to generate a game takes seconds
        kwargs = {"game": request.getfixturevalue("text_world_game")}
    results = check(env_id, kwargs=kwargs, episodes=1)
    assert [result.name for result in results if result.status == "ok"] == [c[0] for c in CHECKS]


def test_an_id_can_be_made_with_its_module_in_front():
    env = gym.make("agent_envs:AgentR1/SyntheticMultiHop-v0")
    assert env.spec.id == "AgentR1/SyntheticMultiHop-v0"


class Echo(TextEnv):
    """The least that keeps the contract: no ToolEnv, and nothing in info but the messages."""

    observation_space = action_space = gym.make("AgentR1/SyntheticTable-v0").action_space
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, reply="{}"):
        self._reply = reply

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._draw = int(self.np_random.integers(1000))
        return str(self._draw), self._info(str(self._draw))

    def step(self, action):
        if not isinstance(action, str):
            raise TypeError(action)
        observation = self._reply.format(len(action))
        return observation, self._reward(action), False, False, self._info(observation)

    def _reward(self, action):
        return 0.0

    def _info(self, text):
        return {"messages": [{"role": "user", "content": text}]}


def statuses(make_env, **options):
    return {result.name: result for result in run_checks(make_env, **options)}


@pytest.fixture
def echo_id():
    gym.register("Kit/Echo-v0", f"{__name__}:Echo", max_episode_steps=3)
    yield "Kit/Echo-v0"
    del gym.registry["Kit/Echo-v0"]


def test_an_environment_that_is_no_tool_env_is_asked_for_what_it_offers(echo_id):
    results = statuses(echo_id, kwargs={"reply": "You wrote {} characters."})
    skipped = {name for name, result in results.items() if result.status == "skipped"}
    # the id is registered in this process only
    assert skipped == {"tasks", "reference actions", "processes"}
    assert not [result for result in results.values() if result.status == "failed"]
    assert results["turn limit"].detail == "3 turns"


