"""The sandbox that an environment chooses."""

import gymnasium as gym
import pytest

from agent_envs.errors import ConfigurationError, SandboxUnavailableError, UnknownNameError
from agent_envs.sandbox import open_sandbox
from agent_envs.tools.code import shared_sandbox


def open_mine():
    return open_sandbox("limits")


def open_nothing():
    return "strong"


def run_hostname(sandbox):
    env = gym.make("AgentR1/CommandLine-v0", sandbox=sandbox, max_episode_steps=3)
    env.reset(seed=0)
    return env.step(env.unwrapped.write_call("shell", command="pwd"))[0]


def test_an_environment_runs_programs_in_the_sandbox_that_it_is_given():
    with open_sandbox("limits") as sandbox:
        assert "agent-envs-scratch-" in run_hostname(sandbox)
    assert "agent-envs-scratch-" in run_hostname(f"{__name__}:open_mine")
    assert shared_sandbox(f"{__name__}:open_mine") is shared_sandbox(f"{__name__}:open_mine")


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ("stron", UnknownNameError, "Did you mean 'strong'"),
        ("no_such_module:sandbox", UnknownNameError, "cannot be imported"),
        (f"{__name__}:open_nothing", ConfigurationError, "is no Sandbox but 'strong'"),
        ("strong:python:3.12", ConfigurationError, "uses no image='python:3.12'"),
        ("container:no/such:image", SandboxUnavailableError, "with the image 'no/such:image'"),
    ],
)
def test_a_choice_that_is_no_sandbox_is_refused(choice, error, message):
    with pytest.raises(error, match=message):
        gym.make("AgentR1/CommandLine-v0", sandbox=choice)
