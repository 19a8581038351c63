import copy
import json
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode

from agent_envs import Task, ToolEnv, tool
from agent_envs.core.vector_env import ThreadVectorEnv
from agent_envs.errors import ActionTypeError, ConfigurationError

DISABLED = AutoresetMode.DISABLED
NAME = "AgentR1/SyntheticMultiHop-v0"
ACTIONS = [
    '<tool_call>{"name": "search", "arguments": {"query": "film star"}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
    "<answer>nobody</answer>",
    "no action",
]


class FragileEnv(ToolEnv):
    """Does what its action says."""

    def __init__(self, release=None, **shared):
        super().__init__(**shared)
        self.release = release

    def get_task(self, index):
        return Task(id=str(index), question=f"task {index}", answers=("x",))

    def step(self, action):
        if action == "hang":
            self.release.wait(60)
        if action == "raise":
            raise RuntimeError("broken")
        if action == "exit":
            raise SystemExit
        return super().step(action)


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def fragile(release, num_envs=3, **kwargs):
    make = lambda: gym.wrappers.TimeLimit(FragileEnv(release), 3)  # noqa: E731
    return ThreadVectorEnv([make] * num_envs, **{"step_timeout": 60, **kwargs})


def without_arguments(value):
    if isinstance(value, dict):
        kept = {k: without_arguments(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if k not in ("arguments", "_arguments")}
    return tuple(map(without_arguments, value)) if isinstance(value, tuple) else value


def test_arguments_of_several_types_stay_whole():
    @tool
    def keep(value: int | float | dict[str, float]) -> str:
        """Keep a value."""
        return "kept"

    envs = gym.make_vec(NAME, 4, tools=[keep])
    envs.reset(seed=0)
    given = [{"value": 3}, {"value": 0.5}, {"value": {"a": 1.0}}]
    calls = [json.dumps({"name": "keep", "arguments": each}) for each in given]
    *_, infos = envs.step([*(f"<tool_call>{call}</tool_call>" for call in calls), "no call"])
    assert infos["action"]["arguments"].tolist() == [*given, None]
    assert infos["action"]["_arguments"].tolist() == [True, True, True, False]
    envs.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_steps_equal_those_of_gymnasiums_vector_environment(mode):
    rng = np.random.default_rng(0)
    with_mode = {"autoreset_mode": mode}
    threaded = gym.make_vec(NAME, 4, **with_mode)
    sync = gym.make_vec(NAME, 4, vectorization_mode="sync", vector_kwargs=with_mode)
    assert isinstance(threaded, ThreadVectorEnv)
    assert threaded.metadata == sync.metadata
    assert threaded.observation_space == sync.observation_space
    actions = [tuple(rng.choice(ACTIONS, 4)) for _ in range(25)]
    over = np.zeros(4, bool)
    for number, batch in enumerate(actions):
        reset = {0: {"seed": 5}, 11: {"seed": [3, None, 1, 9], "options": {"task": 7}}}.get(number)
        if reset is None and over.any() and mode == DISABLED:
            reset = {"options": {"reset_mask": over}}
        results = []
        for envs in (threaded, sync):
            first = envs.reset(**copy.deepcopy(reset)) if reset else None
            results.append((first, envs.step(batch)))
        assert data_equivalence(*map(without_arguments, results), exact=True)
        assert threaded.np_random_seed == sync.np_random_seed
        over = results[1][1][2] | results[1][1][3]
    threaded.close()
    sync.close()


def test_specs_can_be_saved():
    envs = gym.make_vec(NAME, num_envs=2, max_episode_steps=1)
    assert gym.envs.registration.EnvSpec.from_json(envs.spec.to_json()) == envs.spec
    again = gym.make_vec(envs.spec)
    assert isinstance(again, ThreadVectorEnv)
    assert again.num_envs == 2
    again.reset(seed=0)
    assert again.step(["x", "y"])[3].all()  # the turn limit
    envs.close()
    again.close()


def test_tools_of_members_run_concurrently():
    together = threading.Barrier(16, timeout=20)

    @tool
    def meet() -> str:
        """Wait until all are here."""
        together.wait()
        return "met"

    envs = gym.make_vec(NAME, num_envs=16, tools=[meet])
    envs.reset(seed=0)
    observations, *_ = envs.step(['<tool_call>{"name": "meet", "arguments": {}}</tool_call>'] * 16)
    assert all("met" in text for text in observations)
    envs.close()


@pytest.mark.parametrize(
    ("failure", "error", "timeout"),
    [("hang", TimeoutError, 0.3), ("raise", RuntimeError, 60), ("exit", SystemExit, 60)],
)
def test_errors_of_a_member_are_raised(release, failure, error, timeout):
    envs = fragile(release)
    envs.reset(seed=10)
    envs._step_timeout = timeout
    with pytest.raises(error):
        envs.step(["x", failure, "x"])
    envs.close()


def test_errors_of_the_caller_are_raised(release):
    envs = fragile(release)
    with pytest.raises(gym.error.ResetNeeded):
        envs.step(["x"] * 3)
    with pytest.raises(ConfigurationError, match="unknown options"):
        envs.reset(options={"tsak": 1})
    with pytest.raises(ValueError, match="length must match num_envs"):
        envs.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="must have shape"):
        envs.reset(options={"reset_mask": np.array([True])})
    first, _ = envs.reset(seed=3)
    for mask in ([True] * 3, 5, np.array([1, 0, 0]), np.zeros(3, bool)):
        with pytest.raises((TypeError, ValueError), match="reset_mask"):
            envs.reset(seed=4, options={"reset_mask": mask})
    assert envs.get_attr("np_random_seed") == (3, 4, 5)
    with pytest.raises(ActionTypeError):
        envs.step(["x", 5, "x"])
    with pytest.raises(ValueError, match="shorter"):
        envs.step(["x", "x"])
    assert envs.reset(seed=3)[0] == first
    envs.close()
