import copy
import dataclasses
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import Task, Tool, ToolEnv
from agent_envs.errors import AgentEnvsError
from agent_envs.testing import ConformanceError, check, checks, run_checks
from agent_envs.testing.checks import CHECKS
from agent_envs.testing.episodes import TextEnv, reference_actions, tool_calls

WITHOUT_ANSWERS = (
    "AgentR1/AdversarialEdits-v0", "AgentR1/SyntheticMarket-v0", "AgentR1/Tau2Retail-v0",
    "AgentR1/Tau2Airline-v0", "AgentR1/AgentDojo-v0", "AgentR1/BFCL-v0", "AgentR1/TextWorld-v0",
    "AgentR1/ScienceWorld-v0", "AgentR1/TextWorldExpress-v0",
)  # fmt: skip


def test_every_environment_conforms(example):
    env_id, kwargs = example
    results = check(env_id, kwargs=kwargs, episodes=1)
    skipped = {"answers"} if env_id in WITHOUT_ANSWERS else set()
    assert {result.name for result in results if result.status == "ok"} == CHECKS.keys() - skipped


def test_a_copy_continues_as_the_original_would(example):
    env_id, kwargs = example
    with gym.make(env_id, **kwargs) as env, gym.make(env_id, **kwargs) as same:
        for each in (env, same):
            each.reset(seed=1)
        copied = copy.deepcopy(env)
        env.reset(seed=2)
        for action in (reference_actions(env) or tool_calls(env))[:1]:
            env.step(action)
        for action in [*tool_calls(same), *reference_actions(same)]:
            outcome = same.step(action)
            assert copied.step(action) == outcome
            if outcome[2] or outcome[3]:
                break


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


def result_of(make_env, name):
    """Run one check alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHECKS", {name: CHECKS[name]})
        (result,) = run_checks(make_env)
    return result


@pytest.fixture
def register():
    def register(kind, **options):
        gym.register("Kit/Tried-v0", f"{__name__}:{kind.__name__}", **options)
        return "Kit/Tried-v0"

    yield register
    del gym.registry["Kit/Tried-v0"]


def test_an_environment_that_is_no_tool_env_is_asked_for_what_it_offers(register):
    env_id = register(Echo, max_episode_steps=3)
    results = check(env_id, kwargs={"reply": "You wrote {} characters."})
    # the id is registered in this process only
    skipped = {*("tasks", "reference actions", "snapshots", "processes", "rewards", "answers")}
    assert {result.name for result in results if result.status == "skipped"} == skipped
    assert next(result.detail for result in results if result.name == "turn limit") == "3 turns"


class Square(ToolEnv):
    """A small ToolEnv that keeps the contract; each class below breaks it in one place."""

    reward_functions: ClassVar = {"correct": lambda env, event: float(env.is_correct)}
    default_rewards: ClassVar = {"correct": 1.0}
    num_tasks = 10

    def __init__(self, **shared):
        super().__init__(default_tools=[Tool(self.multiply, timeout=None)], **shared)

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    def get_task(self, index):
        return Task(id=f"square-{index}", question=f"{index}²?", answers=(str(index**2),))

    def begin_episode(self):
        self.is_correct = False

    def on_answer(self, answer):
        self.is_correct = answer in self.task.answers

    def metrics(self):
        return {"success": float(self.is_correct), **super().metrics()}

    def reference_actions(self):
        root = int(self.task.id.removeprefix("square-"))
        return [self.write_call("multiply", a=root, b=root), self.write_answer(str(root**2))]


def change_step(change):
    """Return a Square whose steps go through `change`, which takes env, action and outcome."""

    class Changed(Square):
        def step(self, action):
            return change(self, action, list(super().step(action)))

    return Changed


def put(place, value):
    """Return a Square that shows something else in a place of its outcomes or its info."""

    def change(env, action, outcome):
        (outcome if isinstance(place, int) else outcome[4])[place] = value
        return tuple(outcome)

    return change_step(change)


class Remembers(Square):
    def __init__(self, **shared):
        super().__init__(**shared)
        self.seen = set()

    def get_task(self, index):
        self.seen.add(index)
        return Task(id=f"square-{index}", question=f"Of {len(self.seen)}?", answers=(index**2,))


BORN = int(os.environ.setdefault("BORN_IN", str(os.getpid())))


class FailsElsewhere(Square):
    def begin_step(self):
        if os.getpid() != BORN:
            raise ValueError("not here")


class TakesAnyTask(Square):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options and {"task": 0})


class Draws(Square):
    """A tool that the reference actions do not call is random."""

    def __init__(self, **shared):
        tools = [Tool(self.multiply, timeout=None), Tool(self.draw, timeout=None)]
        ToolEnv.__init__(self, default_tools=tools, **shared)

    def draw(self) -> float:
        """Draw a number."""
        return random.random()


class HashesOfTwo(Square):
    """The order of two words often is the same in another process."""

    def get_task(self, index):
        question = " ".join({f"red{index}", f"blue{index}"})
        return Task(id=f"square-{index}", question=question, answers=(str(index**2),))


class PaysForCalls(Square):
    reward_functions: ClassVar = {
        **Square.reward_functions, "calls": lambda env, event: float(bool(event.calls))
    }  # fmt: skip
    default_rewards: ClassVar = {"correct": 1.0, "calls": 0.1}


class SlowsDown(Square):
    def begin_step(self):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        time.sleep(0.02 * (self.num_steps > 60))  # few checks make so many steps


class NoSuccess(Square):
    def metrics(self):
        return ToolEnv.metrics(self)


class TellsTheAnswer(Square):
    def get_task(self, index):
        task = super().get_task(index)
        return dataclasses.replace(task, question=f"{index}²? (It is {task.answers[0]}.)")


class LeavesThreads(Square):
    def begin_episode(self):
        super().begin_episode()
        threading.Thread(target=LEFT.wait, daemon=True).start()


class LeavesFiles(Square):
    def begin_episode(self):
        super().begin_episode()
        FILES.append(os.open(os.devnull, os.O_RDONLY))


class LeavesProcesses(Square):
    def begin_episode(self):
        super().begin_episode()
        PROCESSES.append(subprocess.Popen(["sleep", "60"]))


class ChangesFolder(Square):
    def begin_episode(self):
        super().begin_episode()
        os.chdir("/")


class SeedsEveryone(Square):
    def begin_episode(self):
        super().begin_episode()
        np.random.seed(0)  # noqa: NPY002


class Exits(Square):
    def step(self, action):
        return sys.exit(1) if "\x00" in action else super().step(action)


class ContainsTheAnswer(Square):
    def on_answer(self, answer):
        self.is_correct = self.task.answers[0] in answer


class PartOfTheAnswer(Square):
    def on_answer(self, answer):
        self.is_correct = answer in self.task.answers[0]


class SameIds(Square):
    def get_task(self, index):
        return dataclasses.replace(super().get_task(index), id="square-3")


class GivesOut(Square):
    """Calls of earlier episodes count."""

    num_calls = 0

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        self.num_calls += 1
        return a * b if self.num_calls < 30 else 0


LEFT = threading.Event()
FILES = []
PROCESSES = []


class WrongReference(Square):
    def reference_actions(self):
        return [self.write_answer("-1")]


class AnythingGoes(Square):
    def step(self, action):
        return super().step(f"<answer>{action} </answer>" if "search" in action else action)


class NeedsNoReset(Square):
    def step(self, action):
        if self._task is None:
            self.reset()
        return super().step(action)


class EndsItself(Square):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, True, info


class Warns(Square):
    def reset(self, *, seed=1, options=None):
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(
    ("make_env", "name", "detail"),
    [
        (Warns, "gymnasium", "default seed argument"),
        (put("messages", [{"role": "bot", "content": "x"}]), "info", r"step 1: info\['messages'\]"),
        (put("tools", [{"name": "multiply"}]), "info", "no OpenAI schemas"),
        (put("task_id", 3), "info", "task_id"),
        (put("seen", {1, 2}), "info", "info is not JSON"),
        (put("metrics", {"success": math.nan}), "info", "'success'"),
        (Remembers, "replay", "step 0: observation differs when an environment is reset"),
        (FailsElsewhere, "processes", "fails in another process: ValueError: not here"),
        (TakesAnyTask, "tasks", "there is no task -1, but reset begins it"),
        (WrongReference, "reference actions", r"success=0\.0"),
        (put(1, math.nan), "any text", r"\): the reward is nan"),
        (put(1, 0.5), "reference actions", "reward_terms sum to 0.0, the reward is 0.5"),
        (put(0, "x" * 60_000), "any text", "60000 characters"),
        (AnythingGoes, "any text", "taken for an answer"),
        (put("metrics", {"success": 1.0}), "any text", "is a success"),
        (Draws, "replay", "calls of all tools, step 2: observation differs"),
        (HashesOfTwo, "processes", "observation differs (in a process with other hashes|when ano)"),
        (PaysForCalls, "rewards", "solves the task and earns 1[.]2, more than 'shortest'"),
        (SlowsDown, "speed", "a step takes .* ms at first, and later .* ms"),
        (NoSuccess, "info", r"step 1: info\['metrics'\] holds no 'success'"),
        (TellsTheAnswer, "answers", "states its answer, after 'is'"),
        (LeavesThreads, "leaks", "leave [0-9]+ threads"),
        (LeavesFiles, "leaks", "leave [0-9]+ open files"),
        (LeavesProcesses, "leaks", "leave [0-9]+ processes"),
        (ChangesFolder, "leaks", "changes the current folder"),
        (SeedsEveryone, "leaks", "seeds the generators of the process"),
        (Exits, "any text", "SystemExit: 1"),
        (ContainsTheAnswer, "answers", "or nothing of the kind' is right where the answer is"),
        (PartOfTheAnswer, "answers", "' is right where the answer is"),
        (SameIds, "tasks", "several tasks have the id 'square-3'"),
        (GivesOut, "speed", "observation differs after [0-9]+ rounds of calls"),
        (NeedsNoReset, "misuse", "step before reset raises None"),
    ],
)  # fmt: skip
def test_a_broken_contract_is_reported(make_env, name, detail, monkeypatch):
    monkeypatch.chdir(".")
    LEFT.clear()
    result = result_of(make_env, name)
    LEFT.set()
    while FILES:
        os.close(FILES.pop())
    for process in PROCESSES:
        process.kill()
        process.wait()
    PROCESSES.clear()
    assert result.status == "failed"
    assert re.search(detail, result.detail)


def test_an_environment_must_leave_the_turn_limit_to_gymnasium(register):
    result = result_of(register(EndsItself, max_episode_steps=5), "turn limit")
    assert (result.status, result.detail) == (
        "failed", "max_episode_steps=2: truncated=True when is_last=False",
    )  # fmt: skip


def test_all_failures_are_raised_at_once_a_line_each():
    with pytest.raises(ConformanceError) as raised:
        check(WrongReference)
    assert isinstance(raised.value, AssertionError)
    assert isinstance(raised.value, AgentEnvsError)
    assert str(raised.value) == (
        "reference actions: seed 0: after the reference actions success=0.0\n"
        "rewards: seed 0: the reference actions do not solve the task"
    )
