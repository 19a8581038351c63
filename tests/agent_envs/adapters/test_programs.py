"""Environments of libraries that call a model, as programs.

Those that are not installed are skipped; ``make test-adapters`` installs them.
"""

import asyncio
import contextlib
import os
import threading
from types import SimpleNamespace

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError
from agent_envs.errors import RolloutError
from tests.agent_envs.adapters.drivers import ChatServer, drawn_task, reference
from tests.agent_envs.adapters.test_conformance import ID, oracle, verifiers_module

pytestmark = pytest.mark.filterwarnings("default")  # of other libraries


@contextlib.contextmanager
def session(reply, key):
    """Open an endpoint like a session of the gateway; yield it and its server."""
    with ChatServer(reply) as server:
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{server.port}/v1", key=key), server


@pytest.fixture
def run_verifiers(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    from agent_envs.adapters.verifiers import environment_program

    (tmp_path / "agent_r1.py").write_text(verifiers_module(), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    taskset = {"id": "agent_r1", "environment": ID, "num_tasks": 2, "seed": 7}
    return environment_program({"taskset": taskset})  # as in libraries.md


def test_the_reward_of_a_verifiers_environment_is_its_traces(run_verifiers):
    env = gym.make(ID)
    env.reset(**drawn_task(ID, {}, 7))
    actions = oracle(env)
    expected = reference(ID, {}, drawn_task(ID, {}, 7), actions)

    async def play(sessions):
        return await asyncio.gather(*(run_verifiers(each, {"task": 0}) for each in sessions))

    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(session(lambda place, _: actions[place], key)) for key in "ab"
        ]
        outcomes = asyncio.run(play([each for each, _ in opened]))
    assert [o["reward"] for o in outcomes] == pytest.approx([expected.episode_return] * 2)
    assert outcomes[0]["metrics"]["success"] == 1.0
    assert [server.keys for _, server in opened] == [{"Bearer a"}, {"Bearer b"}]
    assert not [name for name in os.environ if name.startswith("AGENT_R1_SESSION")]


def test_failures_of_verifiers_are_raised(run_verifiers):
    with session(lambda place, _: "x", "a") as (opened, _):
        with pytest.raises(ConfigurationError, match="no task 2"):
            asyncio.run(run_verifiers(opened, {"task": 2}))
        missing = SimpleNamespace(base_url="http://127.0.0.1:9/v1", key="a")
        with pytest.raises(RolloutError, match="verifiers: "):
            asyncio.run(run_verifiers(missing, {"task": 0}))


@pytest.fixture
def arithmetic():
    pytest.importorskip("inspect_ai")
    pytest.importorskip("openai", minversion="3.4", reason="inspect_ai asks a model with openai 3")
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes, match
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def add():
        async def execute(x: int, y: int):
            """Add.

            Args:
                x: One number.
                y: Another.
            """
            return x + y

        return execute

    def make():
        samples = [Sample(input="1 + 1 ?", target="2"), Sample(input="20 + 3 ?", target="23")]
        solver = [use_tools(add()), generate()]
        return Task(dataset=samples, solver=solver, scorer=[match(), includes()])

    return make


CALL = '{"tool_calls": [{"function": {"name": "add", "arguments": "{\\"x\\": 20, \\"y\\": 3}"}}]}'


def test_the_reward_of_an_inspect_task_is_its_scorers(arithmetic, tmp_path, monkeypatch):
    from agent_envs.adapters.inspect_ai import task_program

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    turns, outcomes = [CALL, "it is 23 , I think"], {}
    run = task_program(arithmetic, reward="includes")
    with (
        session(lambda place, _: turns[place], "secret") as (right, server),
        session(lambda place, _: "31", "other") as (wrong, _),
    ):
        threads = [  # at once, as programs are; they take turns
            threading.Thread(target=lambda s=s, t=t: outcomes.update({t: run(s, {"task": t})}))
            for t, s in enumerate([wrong, right])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes[1] == {"reward": 1.0, "metrics": {"match": 0.0, "includes": 1.0}}
    assert outcomes[0]["reward"] == 0.0
    assert server.keys == {"Bearer secret"}
    first, second = server.requests
    assert first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][-1]["content"] == "23"  # what their tool returned


def test_missing_samples_and_scores_are_refused(arithmetic, tmp_path, monkeypatch):
    from agent_envs.adapters.inspect_ai import task_program

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with session(lambda place, _: "2", "a") as (opened, _):
        with pytest.raises(IndexError):
            task_program(arithmetic)(opened, {"task": 2})
        with pytest.raises(ConfigurationError, match=r"no score f1; .*: match, includes"):
            task_program(arithmetic, reward="f1")(opened, {"task": 0})
