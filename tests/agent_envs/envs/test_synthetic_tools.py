import gymnasium as gym
import pytest

from agent_envs import ConfigurationError

ARITHMETIC = "AgentR1/SyntheticArithmetic-v0"
TABLE = "AgentR1/SyntheticTable-v0"


@pytest.mark.parametrize(
    ("env_id", "steps"), [(ARITHMETIC, 1), (ARITHMETIC, 8), (TABLE, 1), (TABLE, 3)]
)
def test_the_calls_lead_to_the_answer_and_each_value_earns_once(env_id, steps):
    env = gym.make(env_id, steps=steps, max_episode_steps=20)
    for task in range(20):
        env.reset(options={"task": task})
        *calls, answer = env.unwrapped.reference_actions()
        assert len(calls) == steps
        rewards = [env.step(call)[1] for call in calls]
        assert sum(rewards) == pytest.approx(0.2)
        assert env.step(calls[0])[1] == 0.0
        assert env.step(answer)[4]["metrics"]["success"] == 1.0


def test_an_expression_means_what_it_says():
    env = gym.make(ARITHMETIC, steps=4)
    for task in range(20):
        question, _ = env.reset(options={"task": task})
        expression = question.removeprefix("What is ").removesuffix("?")
        assert str(eval(expression)) == env.unwrapped.task.answers[0]


def test_mistakes_are_observations():
    env = gym.make(ARITHMETIC)
    env.reset(seed=0)
    call = env.unwrapped.write_call
    assert env.step(call("calculate", a=1, operation="/", b=2))[4]["action"]["error"]
    huge = env.step(call("calculate", a=10**13, operation="*", b=2))
    assert huge[0] == "The numbers are too large."
    _, reward, _, _, info = env.step(env.unwrapped.write_answer("12345678"))
    assert reward == info["metrics"]["success"] == 0.0
    env = gym.make(TABLE)
    env.reset(seed=0)
    observation, *_ = env.step(call("look_up", table="city", key="nobody"))
    assert observation == "The table 'city' has no key 'nobody'."


def test_steps_out_of_range_are_refused():
    with pytest.raises(ConfigurationError, match="steps must be 1 to 3, not 4"):
        gym.make(TABLE, steps=4)
