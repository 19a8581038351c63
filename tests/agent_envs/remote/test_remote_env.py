"""A remote environment behaves like the served one, also when servers come and go."""

import json
import pickle
import socket
import threading
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

pytest.importorskip("websockets", reason="the extra 'serve' is not installed")

from agent_envs import ConfigurationError, Task, ToolEnv
from agent_envs.errors import ServerError, SnapshotError
from agent_envs.remote import env as module
from agent_envs.remote.server import Session
from agent_envs.testing import check
from agent_envs.testing.episodes import record
from tests.agent_envs.core.test_turn_limit import LastStep

MULTI_HOP = "AgentR1/SyntheticMultiHop-v0"


def test_a_remote_environment_passes_the_conformance_kit(serve):
    results = check("AgentR1/Remote-v0", kwargs={"url": serve(MULTI_HOP).url}, episodes=1)
    skipped = [result.name for result in results if result.status != "ok"]
    assert skipped == ["answers"]  # which stay on the server


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        (MULTI_HOP, {"tool_format": "openai", "hops": [1, 2]}),
        ("AgentR1/SyntheticLongHorizon-v0", {"tool_format": "react"}),
        ("AgentR1/HotpotQA-v0", {"data": None}),
    ],
)
def test_episodes_equal_local_ones(serve, remote, data_files, env_id, kwargs):
    if "data" in kwargs:
        kwargs = kwargs | {"data": data_files[env_id]}
    local = gym.make(env_id, render_mode="ansi", **kwargs)
    there = remote(serve(env_id, kwargs), render_mode="ansi")
    for seed in (3, 4):
        assert record(there, seed) == record(local, seed)
    assert local.render() == there.render()
    assert local.unwrapped.metrics() == there.unwrapped.metrics()
    for name in ("num_tasks", "reward_weights", "outcome_terms", "action_format"):
        assert getattr(local.unwrapped, name) == getattr(there.unwrapped, name)
    assert list(local.unwrapped.tools) == list(there.unwrapped.tools)
    assert local.action_space == there.action_space
    assert local.observation_space == there.observation_space


def test_a_turn_limit_of_the_client_reaches_the_environment(serve, remote):
    served = serve(lambda: TimeLimit(LastStep(), 5))
    local, there = TimeLimit(LastStep(), 2), remote(served, max_episode_steps=2)
    for env in (local, there):
        env.reset(seed=1)
        env.step("x")
    snapshot = there.unwrapped.snapshot()
    expected = local.step("y")
    assert expected[1:4] == (1.0, False, True)
    assert repr(there.step("y")) == repr(expected)
    served.restart()
    there.unwrapped.restore(snapshot)
    assert repr(there.step("y")) == repr(expected)
    assert there.unwrapped.max_turns == 2


def test_the_state_is_that_of_the_last_step(serve, remote):
    env = remote(serve(MULTI_HOP))
    env.reset(seed=0)
    info = env.step("hm")[4]
    state = env.unwrapped.state
    assert state["messages"] == info["messages"]
    state["messages"].clear()
    assert env.unwrapped.state["messages"] == info["messages"]


def test_errors_are_those_of_the_environment(serve, remote):
    env = remote(serve(MULTI_HOP, with_reference=False))
    with pytest.raises(gym.error.ResetNeeded):
        env.step("x")
    with pytest.raises(ConfigurationError, match="There is no task -1"):
        env.reset(options={"task": -1})
    with pytest.raises(ConfigurationError, match=r"'tusk'|option 'task' only"):
        env.reset(options={"tusk": 1})
    env.reset(options={"task": np.int64(3)})
    assert env.unwrapped.task_index == 3
    with pytest.raises(NotImplementedError, match="--reference"):
        env.unwrapped.reference_actions()


# Servers that come and go


def finish(env, actions):
    return [json.dumps(env.step(action)) for action in actions]


def run_two_episodes(env, after_message=lambda number: None):
    """Run an episode with a seed and one without."""
    seen = []
    for seed in (9, None):
        seen.append(env.reset(seed=seed))
        after_message(len(seen))
        for action in ["x", env.unwrapped.write_call("search", query="a"), "y"]:
            seen.append(env.step(action))
            after_message(len(seen))
    return json.dumps(seen)


@pytest.mark.parametrize("place", [2, 5])
def test_an_episode_survives_the_restart_of_its_server(serve, remote, place):
    served = serve(MULTI_HOP)
    env = remote(served)
    expected = run_two_episodes(gym.make(MULTI_HOP))
    assert run_two_episodes(env, lambda n: served.restart() if n == place else None) == expected


class PaysByCount(ToolEnv):
    """Its rewards depend on more than seed and actions."""

    num_tasks, number = 3, 0
    reward_functions: ClassVar = {"count": lambda env, event: env.next_number()}
    default_rewards: ClassVar = {"count": 1.0}

    def get_task(self, index):
        return Task(id=f"t{index}", question="?", answers=("a",))

    def next_number(self):
        PaysByCount.number += 1
        return float(PaysByCount.number)


def test_an_episode_that_differs_when_replayed_is_not_resumed(serve, remote):
    served = serve(PaysByCount)
    env = remote(served)
    env.reset(seed=1)
    env.step("x")
    served.restart()
    with pytest.raises(ServerError, match="cannot be resumed"):
        env.step("x")


def test_an_episode_moves_to_another_server(serve, remote):
    servers = [serve(MULTI_HOP), serve(MULTI_HOP)]
    env, local = remote(*servers), gym.make(MULTI_HOP)
    assert env.reset(seed=3) == local.reset(seed=3)
    (first,) = [server for server in servers if server.num_open]
    first.stop()
    assert env.step("x") == local.step("x")
    (second,) = [server for server in servers if server.num_open and server is not first]
    assert second.num_open == 1
    first.start()


def test_sessions_go_to_the_server_with_the_fewest(serve, remote):
    servers = [serve(MULTI_HOP) for _ in range(3)]
    envs = [remote(*servers) for _ in range(9)]
    threads = [threading.Thread(target=env.reset) for env in envs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [server.num_open for server in servers] == [3, 3, 3]


def test_a_full_server_refuses_further_sessions(serve, remote):
    served = serve(MULTI_HOP, max_sessions=1)
    first = remote(served)
    with pytest.raises(ServerError, match="all its sessions are in use"):
        remote(served, connect_timeout=0.1)
    first.close()
    remote(served).reset(seed=0)


def test_a_missing_server_is_an_error_after_the_timeout():
    with pytest.raises(ServerError, match=r"within 0\.2 seconds: http://127\.0\.0\.1:9: .*refused"):
        gym.make("AgentR1/Remote-v0", url="http://127.0.0.1:9", connect_timeout=0.2)
    with pytest.raises(ConfigurationError, match="is not the URL of a server"):
        gym.make("AgentR1/Remote-v0", url="ftp://somewhere")
    with pytest.raises(ConfigurationError, match="is not the URL of a server"):
        gym.make("AgentR1/Remote-v0", url="http://:token@somewhere")
    with pytest.raises(ConfigurationError, match="at least one server"):
        gym.make("AgentR1/Remote-v0", url=[])


def test_servers_of_different_arguments_or_data_are_refused(serve, remote, tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in files:
        path.write_text(json.dumps({"question": f"{path.stem} + 1 ?", "answer": "#### 1"}))
    data = [serve("AgentR1/GSM8K-v0", {"data": str(path)}) for path in files]
    for servers in ([serve(MULTI_HOP), serve(MULTI_HOP, {"hops": [1]})], data):
        with pytest.raises(ConfigurationError, match="serves another environment, or other"):
            remote(*servers)


@pytest.mark.parametrize("field", ["outcome_terms", "fingerprint"])
def test_a_description_with_fewer_fields_names_the_field(serve, remote, field):
    served = serve(MULTI_HOP)
    del served.server.description[field]
    with pytest.raises(ConfigurationError, match=f"description of the environment: {field}: "):
        remote(served)


def test_a_silent_server_delays_no_other(serve, remote, monkeypatch):
    monkeypatch.setattr(module, "OPEN_SECONDS", 0.2)
    served = serve(MULTI_HOP)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for urls in ([silent, served], [served, silent]):
            remote(*urls).reset(seed=1)
        with pytest.raises(ServerError, match=r"within 0\.1 seconds"):
            remote(silent, connect_timeout=0.1)


def test_an_action_that_ends_every_session_is_an_error(serve, remote, monkeypatch):
    handle = Session.handle

    def fragile(self, text):
        return None if "poison" in text else handle(self, text)

    monkeypatch.setattr(Session, "handle", fragile)
    env = remote(serve(MULTI_HOP))
    env.reset(seed=0)
    with pytest.raises(ServerError, match="4 sessions ended during a step"):
        env.step("poison")
    assert env.step("x")[4]["metrics"]["num_turns"] == 1
    with pytest.raises(ServerError, match=r"16,777,\d+ bytes; the limit is 16,777,216"):
        env.step("x" * 2**24)


def test_a_server_that_hangs_is_a_timeout(serve, remote, monkeypatch):
    release, handle = threading.Event(), Session.handle

    def hang(self, text):
        if "hang" in text:
            release.wait(20)
        return handle(self, text)

    monkeypatch.setattr(Session, "handle", hang)
    env = remote(serve(MULTI_HOP))
    env.reset(seed=0)
    env.unwrapped._client.timeout = 0.1
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 seconds"):
        env.step("hang")
    release.set()
    env.unwrapped._client.timeout = 60
    env.reset(seed=0)


def test_a_snapshot_continues_in_any_process_and_on_any_server(serve, remote):
    one, other = serve(MULTI_HOP), serve(MULTI_HOP)
    env, local = remote(one), gym.make(MULTI_HOP)
    for each in (env, local):
        each.reset(seed=4)
        each.step("x")
    snapshot = pickle.loads(pickle.dumps(env.unwrapped.snapshot()))
    expected = finish(local, ["y", "z"])
    assert finish(env, ["y", "z"]) == expected
    for restored in (env, remote(other)):
        restored.unwrapped.restore(snapshot)
        assert finish(restored, ["y", "z"]) == expected
    unlike = remote(serve("AgentR1/SyntheticTable-v0"))
    with pytest.raises(SnapshotError, match="SyntheticTable"):
        unlike.unwrapped.restore(snapshot)
