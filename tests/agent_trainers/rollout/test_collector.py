import asyncio
import copy
import math
import threading
import time
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from numpy.random import default_rng

import agent_envs
from agent_envs import tool
from agent_envs.envs.synthetic.multi_hop import SyntheticMultiHopEnv as MultiHop
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.demonstrations import play_reference
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.tasks.env_members import EnvMember
from agent_trainers.tasks.sources import EnvironmentTasks
from agent_trainers.trajectory import StopReason

ID = "AgentR1/SyntheticMultiHop-v0"


def specs(count, task=None):
    return [
        EpisodeSpec(task=i if task is None else task, seed=0, group_id="g", rng=default_rng(i))
        for i in range(count)
    ]


def say(text):
    return ScriptedPolicy(lambda request: text)


STATE = {"messages": [{"role": "user", "content": "go"}], "task_id": "t"}


class FaultyEnv(gym.Env):
    """Has the fault of its task (a name, seconds, or what a method answers); over at step 3."""

    def __init__(self, faults):
        self._faults = faults

    def reset(self, *, seed=None, options=None):
        self._fault = self._faults.get(options["task"])
        self._steps = 0
        if self._fault == "reset":
            raise OSError("no world")
        return self._answer("reset", "go", copy.deepcopy(STATE))

    def step(self, action):
        self._steps += 1
        if self._fault == "raise" and self._steps == 2:
            raise RuntimeError("broken")
        if self._fault == "exit":
            raise SystemExit(1)
        if isinstance(self._fault, float) and self._steps == 1:
            time.sleep(self._fault)
        info = copy.deepcopy(STATE) | {"tools": [], "metrics": {"success": 1.0}}
        return self._answer("step", "on", np.float32(1.0), np.bool_(self._steps == 3), 0, info)

    def _answer(self, method, *parts):
        if isinstance(self._fault, tuple) and self._fault[0] == method:
            _, place, value = self._fault
            return value() if place is None else (*parts[:place], value, *parts[place:][1:])
        return parts

    def close(self):
        if "close" in self._faults:
            raise SystemExit(1)


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


def test_an_episode_that_fails_takes_no_others_along_and_its_environment_is_not_used_again():
    made, seen = [], []
    faults = {1: "raise", 2: 60.0, 3: ("step", 1, math.nan), 4: "reset", 5: "exit"}
    make_env = lambda: made.append(1) or FaultyEnv(faults)  # noqa: E731
    rollout = Rollout(make_env, say("x"), step_timeout=0.5)
    trajectories = rollout.collect(specs(7), seen.append)
    answered, failed = StopReason.ANSWERED, StopReason.ENVIRONMENT_ERROR
    reasons = [t.stop_reason for t in trajectories]
    assert reasons == [answered, failed, StopReason.TIMEOUT, failed, failed, failed, answered]
    assert "RuntimeError: broken" in trajectories[1].error
    assert "no result within 0.5 seconds" in trajectories[2].error
    assert "reward\n  Input should be a finite number" in trajectories[3].error
    assert "no world" in trajectories[4].error
    assert [t.is_scorable for t in trajectories] == [True, *[False] * 5, True]
    assert len(trajectories[1].transitions) == 1  # what was played before the failure is kept
    assert sorted(t.task for t in seen) == list(range(7))  # each is reported once
    for num_episodes, num_made in ((0, 7), (1, 7), (3, 8)):  # two of seven can be used again
        rollout.collect(specs(num_episodes))
        assert len(made) == num_made


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


class Limited(ScriptedPolicy):
    """Cuts its second turn off, or finds the second state too long."""

    def generate(self, requests):
        return [
            g if request.previous is None else replace(g, finish_reason=self.finish_reason)
            for request, g in zip(requests, super().generate(requests), strict=True)
        ]


def test_what_does_not_fit_ends_the_episode_as_truncated():
    policy = Limited(lambda request: "hm")
    for policy.finish_reason, stop_reason, truncated in (
        ("length", StopReason.TOKEN_LIMIT, [False, True]),
        ("overflow", StopReason.CONTEXT_OVERFLOW, [True]),
    ):
        (trajectory,) = Rollout(lambda: gym.make(ID), policy).collect(specs(1))
        assert trajectory.stop_reason is stop_reason
        assert [t.truncated for t in trajectory.transitions] == truncated
        assert trajectory.is_scorable


def test_an_episode_neither_waits_for_the_others_nor_takes_longer_than_it_may():
    ended = []
    trajectories = Rollout(lambda: FaultyEnv({30: 3.0}), say("x"), episode_timeout=0.25).collect(
        [*specs(1, task=30), *specs(1)], lambda trajectory: ended.append(trajectory.task)
    )
    assert ended == [0, 30]
    assert [t.stop_reason for t in trajectories] == [StopReason.TIMEOUT, StopReason.ANSWERED]
    assert "0.25 seconds" in trajectories[0].error


Unprintable = type("Unprintable", (), {"__repr__": lambda self: 1 / 0})
WRONG_INFOS = [
    ({}, "{}() returned an info without messages"),
    ({"messages": []}, "info.messages\n  "),
    ({"messages": "text"}, "info.messages\n  "),
    ({"messages": [{"role": "user"}]}, "info.messages.0.content\n  Field required"),
    ({"messages": [{"role": "user", "content": {}}]}, "info.messages.0.content\n  "),
    (STATE | {"messages": [{"role": "robot", "content": "x"}]}, "info.messages.0.role\n  "),
    (STATE | {"messages": [{"role": "user", "content": "x", "y": object}]}, "info.messages.0.y"),
    (None, "info\n  Input should be a valid dictionary"),
    (STATE | {"metrics": {"success": "yes"}}, "info.metrics.success\n  "),
    (STATE | {"reward_terms": {"x": math.nan}}, "info.reward_terms.x\n  "),
    (STATE | {"reward_terms": {"x": 1e300}}, "info.reward_terms.x\n  "),
    (STATE | {"tools": "search"}, "info.tools\n  "),
    (STATE | {"action": [1]}, "info.action\n  "),
    (STATE | {"task_id": Unprintable()}, "info.task_id.str\n  "),
]
WRONG_PARTS = [
    (0, None, "observation\n  Input should be a valid string"),
    (1, "1", "reward\n  Input should be a valid number"),
    (1, 10**400, "reward\n  "),
    (1, -1e300, "reward\n  Input should be greater than or equal to -1000000000000000"),
    (1, math.inf, "reward\n  Input should be a finite number"),
    (2, None, "terminated\n  Input should be a valid boolean"),
    (3, "no", "truncated\n  Input should be a valid boolean"),
]


@pytest.mark.parametrize(("method", "parts"), [("reset", []), ("step", WRONG_PARTS)])
def test_each_part_of_the_answer_of_an_environment_is_checked_by_its_name(method, parts):
    wrong = [
        *((-1, info, sentence) for info, sentence in WRONG_INFOS),
        (None, lambda: None, "{}() returned None; it must return ('observation', "),
        (
            None,
            lambda: asyncio.sleep(0, "hello"),
            "{}() returned 'hello'; it must return ('observation', ",
        ),
        *parts,
    ]
    faults = {i: (method, place, value) for i, (place, value, _) in enumerate(wrong, start=1)}
    rollout = Rollout(lambda: FaultyEnv(faults), say("x"))
    right, *trajectories = rollout.collect(specs(1 + len(wrong)))
    assert right.stop_reason is StopReason.ANSWERED
    for trajectory, (_, _, sentence) in zip(trajectories, wrong, strict=True):
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
        assert sentence.format(method) in trajectory.error


class AsyncEnv(gym.Env):
    """Waits for the others in one loop; ends after two steps."""

    observation_space = action_space = agent_envs.ToolEnv().observation_space

    async def reset(self, *, seed=None, options=None):
        self.steps, self.task = 0, (options or {}).get("task")
        return "go", copy.deepcopy(STATE)

    def reference_actions(self):
        return ["x", "y"]

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


@pytest.mark.parametrize("is_made", [False, True])
def test_an_async_environment_is_awaited_in_one_loop(is_made):
    AsyncEnv.loops, AsyncEnv.waiting = set(), []
    spec = EnvSpec("Test/Async-v0", entry_point=AsyncEnv, max_episode_steps=5)
    make_env = (lambda: gym.make(spec)) if is_made else AsyncEnv
    rollout = Rollout(make_env, say("x"), step_timeout=5.0)
    trajectories = rollout.collect([*specs(3), *specs(2, task=4)])
    assert [t.error for t in trajectories] == [None] * 5
    assert len(AsyncEnv.loops) == 1
    hanging = Rollout(make_env, say("x"), step_timeout=0.2).collect(specs(1, task=3))
    assert hanging[0].stop_reason is StopReason.TIMEOUT


def test_what_is_no_environment_and_what_fails_to_close_is_said():
    (trajectory,) = Rollout(lambda: None, say("x")).collect(specs(1))
    assert "make_env returned a NoneType; it must return a Gymnasium env" in trajectory.error
    rollout = Rollout(lambda: FaultyEnv({"close": "exit"}), say("x"))
    assert rollout.collect(specs(2))[0].stop_reason is StopReason.ANSWERED
    rollout.close()


class Waiting(MultiHop):
    """Somebody's subclass of an environment that only computes."""

    def on_answer(self, answer):
        threading.Event().wait()


def test_foreign_code_in_an_environment_of_ours_cannot_hold_the_others_up():
    rollout = Rollout(Waiting, say("<answer>x</answer>"), step_timeout=0.2)
    (trajectory,) = rollout.collect(specs(1))
    assert trajectory.stop_reason is StopReason.TIMEOUT
    term = {"mine": (lambda *_: 0.0, 1.0)}
    for kwargs in ({"rewards": term}, {"context": lambda h: h.messages}):
        assert not gym.make(ID, **kwargs).unwrapped.is_immediate
    assert gym.make(ID, context="budget").unwrapped.is_immediate


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
        if request.rng.bit_generator.state == default_rng(2).bit_generator.state:
            raise ConnectionError("gone")
        return super().generate(requests)


def test_a_server_is_asked_side_by_side_and_its_failure_costs_one_episode():
    policy = Server()
    trajectories = Rollout(lambda: FaultyEnv({}), policy).collect(specs(12))
    assert policy.most == 4
    assert [t.task for t in trajectories if t.stop_reason is StopReason.POLICY_ERROR] == [2]
    assert "gone" in trajectories[2].error


def test_an_async_environment_is_a_source_of_tasks_and_of_demonstrations(tokenizer):
    AsyncEnv.loops, AsyncEnv.waiting = set(), [1] * 4
    make_env = lambda: gym.make(EnvSpec("Test/Async-v0", entry_point=AsyncEnv))  # noqa: E731
    assert EnvironmentTasks([EnvMember(id=make_env)]).pools[0].tasks is None
    (shown,) = play_reference(make_env, ChatRenderer(tokenizer), [0])
    assert [step.action for step in shown.transitions] == ["x", "y"]
