import gymnasium as gym
import pytest

import agent_envs  # noqa: F401
from agent_envs.core.replay import replay
from agent_envs.errors import ReplayError, SnapshotError

SEED, TASK = 3, 7


@pytest.fixture(scope="module")
def env():
    return gym.make("AgentR1/SyntheticMultiHop-v0")


@pytest.fixture(scope="module")
def episode(env):
    env.reset(seed=SEED, options={"task": TASK})
    return [
        *replay(env, SEED, TASK, ["no action", *env.unwrapped.reference_actions()]),
    ], ["no action", *env.unwrapped.reference_actions()]


def test_replaying_gives_the_same_steps(env, episode):
    steps, actions = episode
    recorded = {
        "observations": [step.observation for step in steps],
        "rewards": [step.reward for step in steps[1:]],
        # in another order of keys
        "messages": [[dict(sorted(m.items())) for m in step.info["messages"]] for step in steps],
    }
    assert list(replay(env, SEED, TASK, actions, **recorded)) == steps
    assert steps[-1].is_over


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("observations", lambda steps: ["?", "?"], "after 0 of 1 actions: the replayed observ"),
        ("rewards", lambda steps: [steps[1].reward + 1e-9], "after 1 of 1 .* the replayed reward"),
        ("messages", lambda steps: [steps[0].info["messages"], []], "the recorded one \\[\\]"),
    ],
)
def test_a_difference_from_the_record_is_an_error(env, episode, name, values, message):
    steps, actions = episode
    with pytest.raises(ReplayError, match=message):
        list(replay(env, SEED, TASK, actions[:1], **{name: values(steps)}))


def test_actions_after_the_end_are_an_error(env, episode):
    _, actions = episode
    with pytest.raises(SnapshotError, match="is over before action"):
        list(replay(env, SEED, TASK, [*actions, "one more"]))


def test_async_environments_are_awaited():
    class Async(gym.Env):
        async def reset(self, *, seed=None, options=None):
            return "question", {"seed": seed}

        async def step(self, action):
            return action.upper(), 1.0, action == "end", False, {}

    steps = list(replay(Async(), 5, None, ["a", "end"], timeout=5.0))
    assert [step.observation for step in steps] == ["question", "A", "END"]
    assert steps[0].info == {"seed": 5}
