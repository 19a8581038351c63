import asyncio
import copy
import math
import threading
import time
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

import agent_envs
from agent_envs import tool
from agent_envs.envs.synthetic.multi_hop import SyntheticMultiHopEnv as MultiHop
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason

ID = "AgentR1/SyntheticMultiHop-v0"


def specs(count, task=None):
    return [
        EpisodeSpec(task=i if task is None else task, seed=0, group_id="g",
                    rng=np.random.default_rng(i))
        for i in range(count)
    ]  # fmt: skip


def say(text):
    return ScriptedPolicy(lambda request: text)


class FaultyEnv(gym.Env):
    """Fails at the step that its number says; answers otherwise after three steps."""

    def __init__(self, failures):
        self._failures = failures

    def reset(self, *, seed=None, options=None):
        self._failure = self._failures.get(options["task"])
        self._steps = 0
        if self._failure == "reset":
            raise OSError("no world")
        return "go", self._info()

    def step(self, action):
        self._steps += 1
        if self._failure == "raise" and self._steps == 2:
            raise RuntimeError("broken")
        if self._failure == "exit":
            raise SystemExit(1)
        if self._failure == "hang":
            threading.Event().wait()
        reward = float("nan") if self._failure == "nan" else 1.0
        return "on", reward, self._steps == 3, False, self._info()

    def _info(self):
        return {"messages": [{"role": "user", "content": "go"}], "tools": [], "task_id": "t",
                "metrics": {"success": 1.0}}  # fmt: skip


def test_a_scripted_oracle_solves_every_task_without_a_thread():
    def act(request):
        env.reset(options={"task": tasks[request.messages[-1]["content"]]})
        return env.unwrapped.write_answer(env.unwrapped.task.answers[0])

    env = gym.make(ID)
    tasks = {env.reset(options={"task": i})[0]: i for i in range(5)}
    before = threading.active_count()
    trajectories = Rollout(lambda: gym.make(ID), ScriptedPolicy(act)).collect(specs(5))
    assert threading.active_count() == before  # its steps only compute
    assert all(t.success and t.stop_reason is StopReason.ANSWERED for t in trajectories)
    assert [t.task_id.rsplit("-")[-1] for t in trajectories] == list("01234")


def test_an_episode_that_fails_does_not_take_others_along():
    failures = {1: "raise", 2: "hang", 3: "nan", 4: "reset", 5: "exit"}
    rollout = Rollout(lambda: FaultyEnv(failures), say("x"), step_timeout=0.5)
    trajectories = rollout.collect(specs(7))
    assert [t.stop_reason for t in trajectories] == [
        StopReason.ANSWERED,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.TIMEOUT,
        *[StopReason.ENVIRONMENT_ERROR] * 3,
        StopReason.ANSWERED,
    ]
    assert "RuntimeError: broken" in trajectories[1].error
    assert "no result within 0.5 seconds" in trajectories[2].error
    assert "the reward of step() is nan; it must be a finite number" in trajectories[3].error
    assert "no world" in trajectories[4].error
    assert [t.is_scorable for t in trajectories] == [True, *[False] * 5, True]
    assert len(trajectories[1].transitions) == 1  # what was played before the failure is kept


def test_slow_tools_of_many_episodes_run_at_the_same_time():
    everybody = threading.Barrier(8, timeout=60.0)

    @tool(timeout=60.0)
    def wait() -> str:
        """Wait for the calls of the other episodes."""
        everybody.wait()
        return "waited"

    make_env = lambda: gym.make(ID, tools=[wait], max_episode_steps=1)  # noqa: E731
    policy = say('<tool_call>{"name": "wait"}</tool_call>')
    for trajectory in Rollout(make_env, policy).collect(specs(8)):
        assert trajectory.transitions[0].info["tool_result"] == "waited"


class LimitedPolicy(ScriptedPolicy):
    """Cuts its second turn off, or finds the second state too long."""

    def __init__(self, finish_reason):
        super().__init__(lambda request: "hm")
        self._finish_reason = finish_reason

    def generate(self, requests):
        return [
            replace(generation, finish_reason=self._finish_reason)
            if request.previous is not None
            else generation
            for request, generation in zip(requests, super().generate(requests), strict=True)
        ]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "num_steps"),
    [("length", StopReason.TOKEN_LIMIT, 2), ("overflow", StopReason.CONTEXT_OVERFLOW, 1)],
)
def test_what_does_not_fit_ends_the_episode_as_truncated(finish_reason, stop_reason, num_steps):
    rollout = Rollout(lambda: gym.make(ID), LimitedPolicy(finish_reason))
    (trajectory,) = rollout.collect(specs(1))
    assert trajectory.stop_reason is stop_reason
    assert [t.truncated for t in trajectory.transitions] == [False] * (num_steps - 1) + [True]
    assert trajectory.is_scorable


def test_each_trajectory_is_reported_once_and_an_environment_that_failed_is_not_used_again():
    made, seen = [], []

    def make_env():
        made.append(FaultyEnv({1: "raise"}))
        return made[-1]

    rollout = Rollout(make_env, say("x"))
    trajectories = rollout.collect(specs(3), seen.append)
    assert len(seen) == 3
    assert {t.stop_reason for t in seen} == {t.stop_reason for t in trajectories}
    rollout.collect(specs(1))
    assert len(made) == 3
    rollout.collect(specs(3))
    assert len(made) == 4


class SlowEnv(FaultyEnv):
    """Its first step takes as long as its task says, in tenths of a second."""

    def __init__(self):
        super().__init__({})

    def reset(self, *, seed=None, options=None):
        self._seconds = options["task"] / 10
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._steps == 0:
            time.sleep(self._seconds)
        return super().step(action)


def test_an_episode_neither_waits_for_the_others_nor_takes_longer_than_it_may():
    ended = []
    trajectories = Rollout(SlowEnv, say("x"), episode_timeout=0.25).collect(
        [*specs(1, task=30), *specs(1)], lambda trajectory: ended.append(trajectory.task)
    )
    assert ended == [0, 30]
    assert [t.stop_reason for t in trajectories] == [StopReason.TIMEOUT, StopReason.ANSWERED]
    assert "0.25 seconds" in trajectories[0].error


def test_stragglers_are_left_out_once_every_group_has_its_quorum():
    def group(name, tasks):
        return [replace(spec, task=t, group_id=name)
                for spec, t in zip(specs(4), tasks, strict=True)]  # fmt: skip

    trajectories = Rollout(
        SlowEnv, say("x"), group_quorum=0.6
    ).collect(  # 0.6 * 4 is rounded up to 3
        [*group("a", (0, 0, 0, 30)), *group("b", (0, 0, 4, 30))]
    )
    left_out = [t.stop_reason is StopReason.LEFT_OUT for t in trajectories]
    assert left_out == [False, False, False, True] * 2
    assert not trajectories[3].is_scorable


STATE = {"messages": [{"role": "user", "content": "go"}], "task_id": "t"}


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


async def hello():
    return "hello"


class Careless(FaultyEnv):
    """Answers a reset, or its first step, with what it was given."""

    def __init__(self, method, answer):
        super().__init__({})
        self._wrong, self._answer = method, answer

    def reset(self, *, seed=None, options=None):
        right = super().reset(seed=seed, options=options)
        return self._wrongly(right, options["task"]) if self._wrong == "reset" else right

    def step(self, action):
        right = super().step(action)
        return self._wrongly(right, 1) if self._wrong == "step" else right

    def _wrongly(self, right, task):
        if task == 0:
            return right
        return self._answer() if callable(self._answer) else (*right[:-1], self._answer)


NUMBERS = "a dictionary from names to finite numbers"


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({}, "info['messages'] of {}() is None; it must be a non-empty list of"),
        ({"messages": []}, "info['messages'] of {}() is []; it must be"),
        ({"messages": "text"}, "info['messages'] of {}() is 'text'; it must be"),
        ({"messages": [{"role": "user"}]}, "is [{{'role': 'user'}}]; it must be a non-empty"),
        ({"messages": [{"role": "user", "content": {}}]}, "it must be a non-empty list of"),
        (STATE | {"messages": [{"role": "robot", "content": "x"}]}, "of {}() is 'robot'; it must"),
        (STATE | {"messages": [{"role": "user", "content": "x", "y": object}]}, "non-empty list"),
        (None, "info of {}() is None; it must be a dictionary"),
        (STATE | {"metrics": {"success": "yes"}}, NUMBERS),
        (STATE | {"reward_terms": {"x": math.nan}}, NUMBERS),
        (STATE | {"tools": "search"}, "info['tools'] of {}() is 'search'; it must be a list"),
        (STATE | {"action": [1]}, "info['action'] of {}() is [1]; it must be a dictionary"),
        (STATE | {"task_id": Unprintable()}, "it must be a string"),
        (lambda: None, "{}() returned None; it must return (observation, "),
        (hello, "{}() returned 'hello'; it must return (observation, "),
    ],
)
def test_the_answer_of_an_environment_is_checked(method, answer, sentence):
    good = replace(specs(1)[0], task=0)
    rollout = Rollout(lambda: Careless(method, answer), say("x"))
    wrong, right = rollout.collect([*specs(1, 1), good])
    assert wrong.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert sentence.format(method) in wrong.error
    if method == "reset":
        assert right.stop_reason is not StopReason.ENVIRONMENT_ERROR


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (0, None, "the observation of step() is None; it must be a string"),
        (1, "1", "the reward of step() is '1'; it must be a finite number"),
        (1, 10**400, "the reward of step() is 1000"),
        (1, math.inf, "the reward of step() is inf; it must be a finite number"),
        (2, None, "terminated of step() is None; it must be True or False"),
        (3, "no", "truncated of step() is 'no'; it must be True or False"),
    ],
)
def test_each_part_of_a_step_is_checked_by_its_name(place, value, sentence):
    def answer():
        parts = ["on", np.float32(1.0), np.bool_(False), 0, STATE]
        parts[place] = value
        return parts

    (wrong,) = Rollout(lambda: Careless("step", answer), say("x")).collect(specs(1, 1))
    assert wrong.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert sentence in wrong.error


class AsyncEnv(gym.Env):
    """Waits for the others in one loop; ends after two steps."""

    observation_space = action_space = agent_envs.ToolEnv().observation_space
    loops, waiting = set(), []

    async def reset(self, *, seed=None, options=None):
        self.steps, self.task = 0, options["task"]
        return "go", copy.deepcopy(STATE)

    async def step(self, action):
        self.loops.add(asyncio.get_running_loop())
        self.steps += 1
        if self.task == 3:
            await asyncio.sleep(60)
        if self.steps == 1:
            self.waiting.append(1)
            while len(self.waiting) < 4:
                await asyncio.sleep(0.01)
        return "on", 1.0, self.steps == 2, False, copy.deepcopy(STATE)


@pytest.fixture
def async_id():
    AsyncEnv.loops.clear()
    AsyncEnv.waiting.clear()
    gym.register("Test/Async-v0", AsyncEnv, max_episode_steps=5)
    yield "Test/Async-v0"
    del gym.registry["Test/Async-v0"]


@pytest.mark.parametrize("is_made", [False, True])
def test_an_async_environment_is_awaited_in_one_loop(async_id, is_made):
    make_env = (lambda: gym.make(async_id)) if is_made else AsyncEnv
    rollout = Rollout(make_env, say("x"), step_timeout=5.0)
    five = [*specs(3), *specs(2, task=4)]
    trajectories = rollout.collect(five)
    assert [t.error for t in trajectories] == [None] * 5
    assert len(AsyncEnv.loops) == 1
    hanging = Rollout(make_env, say("x"), step_timeout=0.2).collect(specs(1, task=3))
    assert hanging[0].stop_reason is StopReason.TIMEOUT


def test_what_is_no_environment_and_what_fails_to_close_is_said():
    (trajectory,) = Rollout(lambda: None, say("x")).collect(specs(1))
    assert "make_env returned a NoneType; it must return a Gymnasium env" in trajectory.error

    class Stuck(FaultyEnv):
        def close(self):
            raise SystemExit(1)

    rollout = Rollout(lambda: Stuck({}), say("x"))
    assert rollout.collect(specs(2))[0].stop_reason is StopReason.ANSWERED
    rollout.close()


class Waiting(MultiHop):
    """Somebody's subclass of an environment that only computes."""

    def on_answer(self, answer):
        threading.Event().wait()


def test_foreign_code_in_an_environment_of_ours_cannot_hold_the_others_up():
    (trajectory,) = Rollout(
        Waiting, say("<answer>x</answer>"), step_timeout=0.2
    ).collect(specs(1))  # fmt: skip
    assert trajectory.stop_reason is StopReason.TIMEOUT
    term = {"mine": (lambda *_: 0.0, 1.0)}
    for kwargs in ({"rewards": term}, {"context": lambda h: h.messages}):
        assert not gym.make(ID, **kwargs).unwrapped.is_immediate
    assert gym.make(ID, context=["window", "budget"]).unwrapped.is_immediate


class Server(ScriptedPolicy):
    """A policy that is asked by many threads; some requests fail."""

    max_concurrency = 4

    def __init__(self):
        super().__init__(lambda request: "x")
        self.now, self.most, self._lock = 0, 0, threading.Lock()

    def generate(self, requests):
        (request,) = requests
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self._lock:
            self.now -= 1
        if request.rng.bit_generator.state == np.random.default_rng(2).bit_generator.state:
            raise ConnectionError("gone")
        return super().generate(requests)


def test_a_server_is_asked_side_by_side_and_its_failure_costs_one_episode():
    policy = Server()
    trajectories = Rollout(lambda: FaultyEnv({}), policy).collect(specs(12))
    assert policy.most == 4
    reasons = [t.stop_reason for t in trajectories]
    assert reasons.count(StopReason.POLICY_ERROR) == 1
    assert reasons[2] is StopReason.POLICY_ERROR
    assert "gone" in trajectories[2].error
