"""`StepEvent.is_last` at the turn limit, wherever Gymnasium keeps it."""

from typing import ClassVar

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset, RecordEpisodeStatistics, TimeLimit

from agent_envs import Task, ToolEnv
from agent_envs.wrappers.awaited import awaited


class LastStep(ToolEnv):
    """Pays 1 for the last step."""

    reward_functions: ClassVar = {"last": lambda env, event: float(event.is_last)}
    default_rewards: ClassVar = {"last": 1.0}

    def get_task(self, index):
        return Task(id="wait", question="Wait.", answers=())


@pytest.fixture(autouse=True)
def _registered():
    gym.register("Last/Step-v0", f"{__name__}:LastStep", max_episode_steps=3)
    yield
    del gym.registry["Last/Step-v0"]


def make():
    return gym.make("Last/Step-v0")


MADE = {
    "register": make,
    "own wrapper": lambda: TimeLimit(LastStep(), 3),
    "two wrappers": lambda: TimeLimit(gym.make("Last/Step-v0", max_episode_steps=9), 3),
    "outside": lambda: RecordEpisodeStatistics(make()),
    "inside": lambda: TimeLimit(RecordEpisodeStatistics(LastStep()), 3),
    "autoreset": lambda: Autoreset(make()),
}


@pytest.mark.parametrize("how", MADE)
def test_the_step_at_the_limit_is_last(how):
    env = MADE[how]()
    for _ in range(2):
        env.reset(seed=0)
        rewards = [env.step("hm")[1] for _ in range(3)]
        assert rewards == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_members_of_a_vector_environment_have_a_limit(mode):
    envs = SyncVectorEnv([make, make], autoreset_mode=mode)
    envs.reset(seed=0)
    rewards = []
    for _ in range(3):
        _, reward, _, truncated, _ = envs.step(["hm", "hm"])
        rewards.append(reward.tolist())
    assert truncated.all()
    assert rewards == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def test_a_restored_episode_has_the_limit_of_its_environment():
    env, longer = make(), gym.make("Last/Step-v0", max_episode_steps=5)
    for made in (env, longer):
        made.reset(seed=0)
    env.step("hm")
    snapshot = env.unwrapped.snapshot()
    env.step("hm")
    for made, num_steps in ((env, 2), (longer, 4)):
        made.unwrapped.restore(snapshot)
        outcomes = [made.step("hm")[1:4] for _ in range(num_steps)]
        assert outcomes == [(0.0, False, False)] * (num_steps - 1) + [(1.0, False, True)]
    assert longer.unwrapped.max_turns == 5


class AsyncLastStep(LastStep):
    """Runs on the event loop, where no wrapper is among the callers."""

    async def reset(self, **options):
        return super().reset(**options)

    async def step(self, action):
        return super().step(action)


def test_the_last_step_of_an_async_environment_is_known():
    env = awaited(TimeLimit(AsyncLastStep(), 3))
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step("x")[1] for _ in range(3)] == [0.0, 0.0, 1.0]
    assert env.unwrapped.max_turns == 3
