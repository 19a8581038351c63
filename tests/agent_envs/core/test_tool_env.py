import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, UnknownNameError, tool
from agent_envs.errors import ActionTypeError

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.mark.parametrize("options", [{"task": -1}, {"task": 2**31}, {"task": "1"}, {"tsk": 1}])
def test_an_impossible_task_is_refused(options):
    with pytest.raises(ConfigurationError):
        gym.make(ID).reset(options=options)


def test_stepping_after_the_end_or_with_a_number_is_a_programming_error():
    env = gym.make(ID).unwrapped
    env.reset(seed=0)
    with pytest.raises(ActionTypeError):
        env.step(3)
    env.step("<answer>x</answer>")
    with pytest.raises(gym.error.ResetNeeded):
        env.step("<answer>x</answer>")


def test_changing_info_does_not_change_the_environment():
    env = gym.make(ID)
    _, info = env.reset(seed=0)
    info["messages"][0]["content"] = "changed"
    info["tools"][0]["function"]["parameters"]["properties"].clear()
    info = env.step("hm")[4]
    assert info["messages"][0]["content"] != "changed"
    assert info["tools"][0]["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"rewards": {"exact_macth": 1.0}}, UnknownNameError, "Did you mean 'exact_match'"),
        ({"rewards": {"exact_match": float("nan")}}, ConfigurationError, "must be a finite"),
        ({"rewards": {"exact_match": "1"}}, ConfigurationError, "must be a finite"),
        ({"tool_format": "hermis"}, UnknownNameError, "Did you mean 'hermes'"),
        ({"tools": [len]}, ConfigurationError, "@tool"),
        ({"hops": 5}, ConfigurationError, "1 to 4"),
        ({"split": "dev"}, UnknownNameError, "test, train"),
        ({"variant": "defalt"}, UnknownNameError, "Did you mean 'default'"),
    ],
)
def test_a_wrong_argument_is_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        gym.make(ID, **kwargs)


@pytest.mark.parametrize("name", ["think", "answer"])
def test_a_tool_is_not_named_as_a_tag_of_the_format(name):
    @tool(name=name)
    def think(thought: str) -> str:
        """Think."""
        return thought

    gym.make(ID, tools=[think], tool_format="hermes")
    with pytest.raises(ConfigurationError, match=f"tag of the tool '{name}'"):
        gym.make(ID, tools=[think], tool_format="tags")


def test_tools_and_the_system_prompt_can_be_replaced():
    @tool(name="search")
    def nothing(query: str) -> str:
        """Find nothing."""
        return "nothing"

    env = gym.make(ID, tools=[nothing], system_prompt="Hi")
    assert env.reset(seed=0)[1]["messages"][0]["content"] == "Hi"
    assert env.step(env.unwrapped.write_call("search", query="x"))[0] == "nothing"
    assert gym.make(ID, system_prompt="").reset(seed=0)[1]["messages"][0]["role"] == "user"
