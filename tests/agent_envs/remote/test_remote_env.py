"""A remote environment is the environment that is served, also when servers come and go."""

import contextlib
import copy
import json
import os
import pickle
import socket
import threading
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

pytest.importorskip("websockets", reason="the extra 'serve' is not installed")
pytest.importorskip("cryptography", reason="the extra 'serve' is not installed")

from agent_envs import ConfigurationError, Task, Tool, ToolEnv
from agent_envs.errors import ServerError, SnapshotError
from agent_envs.remote import link
from agent_envs.testing import check
from agent_envs.testing.episodes import record
from agent_envs.wrappers import ConversationObservation, PotentialShaping, found_gold
from agent_trainers.policies.scripted import ScriptedPolicy
from agent_trainers.rollout.collector import EpisodeSpec, Rollout
from agent_trainers.trajectory import StopReason
from benchmarks import remote_play

MULTI_HOP = "AgentR1/SyntheticMultiHop-v0"


def mistake_then_reference(env):
    return ["no action", *env.unwrapped.reference_actions()]


def test_a_remote_environment_keeps_the_contract(serve):
    results = check("AgentR1/Remote-v0", kwargs={"url": serve(MULTI_HOP).url}, episodes=1)
    assert [result.name for result in results if result.status != "ok"] == []


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        (MULTI_HOP, {"tool_format": "openai", "hops": [1, 2]}),
        ("AgentR1/SyntheticTable-v0", {"context": {"name": "window", "turns": 1}}),
        ("AgentR1/SyntheticLongHorizon-v0", {"tool_format": "react"}),
        ("AgentR1/CommandLine-v0", {}),
        ("AgentR1/HotpotQA-v0", {"data": None}),
    ],
)
def test_what_is_seen_is_what_is_seen_here(serve, remote, data_files, env_id, kwargs):
    if "data" in kwargs:
        kwargs = kwargs | {"data": data_files[env_id]}
    here, there = gym.make(env_id, **kwargs), remote(serve(env_id, kwargs))
    for seed in (3, 4):
        assert record(there, seed) == record(here, seed)
    assert here.unwrapped.metrics() == there.unwrapped.metrics()
    assert here.unwrapped.num_tasks == there.unwrapped.num_tasks
    assert here.unwrapped.reward_weights == there.unwrapped.reward_weights
    assert here.unwrapped.outcome_terms == there.unwrapped.outcome_terms
    assert list(here.unwrapped.tools) == list(there.unwrapped.tools)
    assert here.unwrapped.action_format is there.unwrapped.action_format
    assert here.action_space == there.action_space
    assert here.observation_space == there.observation_space


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_vector_of_remote_environments_is_one_of_local_ones(serve, mode):
    served, options = serve(MULTI_HOP), {"num_envs": 3, "autoreset_mode": mode}
    here = gym.make_vec(MULTI_HOP, **options)
    there = gym.make_vec("AgentR1/Remote-v0", url=served.url, **options)
    assert repr(here.reset(seed=5)) == repr(there.reset(seed=5))
    for _ in range(6):  # of four turns each: episodes end, and others begin without a seed
        assert repr(here.step(["x"] * 3)) == repr(there.step(["x"] * 3))
    there.close()
    assert served.num_open <= 3


def test_processes_can_play_it(serve):
    url = serve(MULTI_HOP).url
    make = [lambda: gym.make("AgentR1/Remote-v0", url=url)] * 2
    there = gym.vector.AsyncVectorEnv(make, context="forkserver" if os.name != "nt" else "spawn")
    here = gym.vector.SyncVectorEnv([lambda: gym.make(MULTI_HOP)] * 2)
    assert list(there.reset(seed=1)[0]) == list(here.reset(seed=1)[0])
    assert list(there.step(["x", "y"])[0]) == list(here.step(["x", "y"])[0])
    there.close()


def test_wrappers_see_the_same(serve, remote):
    def wrapped(env):
        return ConversationObservation(PotentialShaping(env, found_gold))

    here, there = wrapped(gym.make(MULTI_HOP)), wrapped(remote(serve(MULTI_HOP)))
    assert record(here, 2) == record(there, 2)


class PaysAtTheEnd(ToolEnv):
    """Knows which turn is the last one."""

    num_tasks = 3
    reward_functions: ClassVar = {"last": lambda env, event: float(event.is_last)}
    default_rewards: ClassVar = {"last": 1.0}

    def get_task(self, index):
        return Task(id=f"t{index}", question="?", answers=("a",))


def test_a_limit_of_the_clients_own_is_one_of_the_environments(serve, remote):
    """The last turn is known as such, also after a restart, where terms are paid at the end."""
    served = serve(lambda: TimeLimit(PaysAtTheEnd(), 5))
    here, there = TimeLimit(PaysAtTheEnd(), 2), remote(served, max_episode_steps=2)
    for env in (here, there):
        env.reset(seed=1)
        env.step("x")
    snapshot = there.unwrapped.snapshot()
    expected = here.step("y")
    assert expected[1:4] == (1.0, False, True)
    assert repr(there.step("y")) == repr(expected)
    served.restart()
    there.unwrapped.restore(snapshot)
    assert repr(there.step("y")) == repr(expected)
    assert there.unwrapped.max_turns == 2


def test_it_is_shown_as_the_environment_is(serve, remote):
    here, there = (
        gym.make(MULTI_HOP, render_mode="ansi"),
        remote(serve(MULTI_HOP), render_mode="ansi"),
    )
    for env in (here, there):
        record(env, 1)
    assert here.render() == there.render()


def test_mistakes_of_the_caller_are_those_of_the_environment(serve, remote):
    env = remote(serve(MULTI_HOP))
    with pytest.raises(gym.error.ResetNeeded):
        env.step("x")
    with pytest.raises(ConfigurationError, match="There is no task -1"):
        env.reset(options={"task": -1})
    with pytest.raises(ConfigurationError, match="knows the option 'task' only"):
        env.reset(options={"tusk": 1})
    env.reset(options={"task": np.int64(3)})
    assert env.unwrapped.task_index == 3


def test_solutions_stay_on_the_server_unless_it_says_so(serve, remote):
    env = remote(serve(MULTI_HOP, with_reference=False))
    env.reset(seed=0)
    with pytest.raises(NotImplementedError, match="--reference"):
        env.unwrapped.reference_actions()


# Servers that come and go


def finish(env, actions):
    return [json.dumps(env.step(action)) for action in actions]


def play_two_episodes(env, at=lambda place: None):
    """Play an episode by seed and one without; `at` is called after each message."""
    shown = []
    for seed in (9, None):
        shown.append(env.reset(seed=seed))
        at(len(shown))
        for action in ["x", env.unwrapped.write_call("search", query="a"), "y"]:
            shown.append(env.step(action))
            at(len(shown))
    return json.dumps(shown)


@pytest.mark.parametrize("key", ["the same", None])
@pytest.mark.parametrize("place", [2, 4, 5, 7])
def test_an_episode_survives_the_restart_of_its_server(serve, remote, place, key):
    """With another key the server cannot open the snapshot: what was done is done again."""
    served = serve(MULTI_HOP, key="the same key of all" if key else None)
    env = remote(served)
    expected = play_two_episodes(gym.make(MULTI_HOP))

    def restart(now):
        if now == place:
            served.restart()

    if key is None and place >= 5:  # the second episode's generator died with the server
        with pytest.raises(ServerError, match="AGENT_ENVS_KEY"):
            play_two_episodes(env, restart)
    else:
        assert play_two_episodes(env, restart) == expected
        assert env.unwrapped.num_sessions == 2


class Remembers(ToolEnv):
    """Its state cannot be saved."""

    num_tasks = 5

    def __init__(self, **shared):
        self.lock = threading.Lock()
        super().__init__(default_tools=[Tool(self.count)], **shared)

    def get_task(self, index):
        return Task(id=f"t{index}", question=f"Question {index}?", answers=("a",))

    def begin_episode(self):
        self.num = 0

    def count(self) -> int:
        """Count."""
        self.num += 1
        return self.num


class Forgets(Remembers):
    """What it shows depends on more than seed and actions."""

    number = 0

    def count(self) -> int:
        """Count."""
        Forgets.number += 1
        return Forgets.number


def test_an_episode_without_snapshots_is_resumed_by_its_actions(serve, remote):
    served = serve(Remembers)
    env = remote(served)
    call = env.unwrapped.write_call("count")
    env.reset(seed=1)
    with pytest.raises(SnapshotError):
        Remembers().snapshot()
    assert "1" in env.step(call)[0]
    served.restart()
    assert "2" in env.step(call)[0]
    env.reset()
    env.step(call)
    served.restart()
    assert "2" in env.step(call)[0]


class FailsToRestore(Remembers):
    """As one that was changed since the snapshot was taken."""

    not_in_snapshots = frozenset({"lock"})

    def on_restore(self):
        raise KeyError("what is new")


def test_a_snapshot_that_cannot_be_restored_is_done_without(serve, remote):
    served = serve(FailsToRestore)
    env = remote(served)
    env.reset(seed=1)
    env.step(env.unwrapped.write_call("count"))
    served.restart()
    assert "2" in env.step(env.unwrapped.write_call("count"))[0]


def test_an_episode_that_comes_out_otherwise_is_not_gone_on_with(serve, remote):
    served = serve(Forgets)
    env = remote(served)
    env.reset(seed=1)
    env.step(env.unwrapped.write_call("count"))
    served.restart()
    with pytest.raises(ServerError, match="something else than before"):
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


def test_who_is_between_episodes_makes_room(serve, remote):
    """More environments than sessions: all are played, as many at a time as there are sessions."""
    served = serve(MULTI_HOP, max_sessions=2)
    envs = [remote(served) for _ in range(5)]
    for env in envs:
        env.reset(seed=0)
        env.step(env.unwrapped.write_answer("x"))
    envs[0].reset(seed=0)
    envs[1].reset()
    assert served.num_open == 2
    with pytest.raises(ServerError, match="all its 2 sessions are taken"):
        remote(served, timeout=0.2).reset(seed=0)


def test_no_server_is_an_error_that_says_so_after_a_while():
    with pytest.raises(ServerError, match=r"in 0\.2 seconds \(http://127\.0\.0\.1:9: .*refused"):
        gym.make("AgentR1/Remote-v0", url="http://:secret@127.0.0.1:9", patience=0.2)
    with pytest.raises(ConfigurationError, match="is no URL of a server"):
        gym.make("AgentR1/Remote-v0", url="ftp://somewhere")
    with pytest.raises(ConfigurationError, match="at least one server"):
        gym.make("AgentR1/Remote-v0", url=[])


def test_servers_of_something_else_are_not_played(serve, remote):
    one, other = serve(MULTI_HOP), serve(MULTI_HOP, {"tool_format": "json"})
    env = remote(one, other, patience=0.3)
    one.stop()
    with pytest.raises(ServerError, match="serves another environment"):
        env.reset(seed=0)
    one.start()


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "without end"])
def test_a_server_that_never_answers_whole_holds_nobody_up(monkeypatch, is_silent):
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(link, "AVOID_SECONDS", 60.0)
    over = threading.Event()

    def drip(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            if not is_silent:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not over.wait(0.05):
                if not is_silent:
                    connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=[listener])
        thread.start()
        slow = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started, reasons = time.monotonic(), []
        assert link.Link(slow, patience=1.0, timeout=1.0)._with_room(reasons) == []
        ended = time.monotonic()
        over.set()
        thread.join()
    assert ended - started < 10
    whys = ("no result within 0.2 seconds", "timed out", "does not end")
    assert any(why in reasons[0] for why in whys)
    # it is not asked again for so long, from when its time was up
    assert link._away_until[slow] >= started + 0.2 + 60.0


def test_an_action_that_ends_every_session_is_given_up(serve, remote, monkeypatch):
    from agent_envs.remote.session import Session

    handle = Session.handle

    def fragile(self, text):
        return None if "poison" in text else handle(self, text)

    monkeypatch.setattr(Session, "handle", fragile)
    env = remote(serve(MULTI_HOP))
    env.reset(seed=0)
    with pytest.raises(ServerError, match="4 sessions ended while a step was carried out"):
        env.step("poison")
    assert env.step("x")[4]["metrics"]["num_turns"] == 1


def test_an_action_that_no_server_reads_is_not_sent(serve, remote):
    env = remote(serve(MULTI_HOP))
    env.reset(seed=0)
    with pytest.raises(ServerError, match="longer than servers read"):
        env.step("x" * 2**24)
    assert env.unwrapped.num_sessions == 1


def test_a_server_that_hangs_is_a_timeout(serve, remote, monkeypatch):
    from agent_envs.remote.session import Session

    release, handle = threading.Event(), Session.handle

    def hang(self, text):
        if "hang" in text:
            release.wait(20)
        return handle(self, text)

    monkeypatch.setattr(Session, "handle", hang)
    env = remote(serve(MULTI_HOP))
    env.reset(seed=0)
    env.unwrapped._link._timeout = 0.1
    with pytest.raises(TimeoutError, match=r"no answer in 0\.1 seconds"):
        env.step("hang")
    release.set()
    env.unwrapped._link._timeout = 60
    env.reset(seed=0)


# Snapshots on the client's side


def test_a_snapshot_goes_on_in_any_process_and_on_any_server(serve, remote):
    one, other = serve(MULTI_HOP), serve(MULTI_HOP)
    env, local = remote(one), gym.make(MULTI_HOP)
    for each in (env, local):
        each.reset(seed=4)
        each.step("x")
    snapshot = pickle.loads(pickle.dumps(env.unwrapped.snapshot()))
    expected = finish(local, ["y", "z"])
    assert finish(env, ["y", "z"]) == expected
    env.unwrapped.restore(snapshot)
    assert finish(env, ["y", "z"]) == expected
    elsewhere = remote(other)
    elsewhere.unwrapped.restore(snapshot)
    assert finish(elsewhere, ["y", "z"]) == expected
    env.unwrapped.restore(snapshot)
    copied = copy.deepcopy(env)
    assert finish(copied, ["y", "z"]) == expected
    copied.close()


def test_a_snapshot_of_another_environment_is_refused(serve, remote):
    env, other = remote(serve(MULTI_HOP)), remote(serve("AgentR1/SyntheticTable-v0"))
    env.reset(seed=0)
    with pytest.raises(SnapshotError, match="SyntheticTable"):
        other.unwrapped.restore(env.unwrapped.snapshot())


# Together with rollouts


def test_rollouts_over_servers_are_those_over_local_environments(serve):
    urls = [serve(MULTI_HOP).url, serve(MULTI_HOP).url]
    specs = [
        EpisodeSpec(task=i, seed=i, group_id=str(i // 2), rng=np.random.default_rng(i))
        for i in range(8)
    ]

    def rollout(make_env):
        played = Rollout(make_env, ScriptedPolicy(lambda request: "x" * len(request.messages)))
        trajectories = played.collect(specs)
        played.close()
        return [(t.task_id, t.metrics, t.stop_reason, t.transitions[-1].info) for t in trajectories]

    there = rollout(lambda: gym.make("AgentR1/Remote-v0", url=urls))
    assert there == rollout(lambda: gym.make(MULTI_HOP))


def test_an_environment_that_finds_no_server_costs_its_episode_alone(serve):
    urls = iter([serve(MULTI_HOP).url, "http://127.0.0.1:9"])
    specs = [
        EpisodeSpec(task=i, seed=i, group_id="g", rng=np.random.default_rng(i)) for i in range(2)
    ]
    played = Rollout(
        lambda: gym.make("AgentR1/Remote-v0", url=next(urls), patience=0.1),
        ScriptedPolicy(lambda request: "x"),
    )
    well, badly = played.collect(specs)
    played.close()
    assert well.error is None
    assert badly.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "No server took the episode in 0.1 seconds" in badly.error


def test_no_episode_is_lost_when_a_server_is_killed():
    report = remote_play.measure(MULTI_HOP, {}, num_episodes=60, num_sessions=8, kills=1)
    assert report.errors == []
    assert (report.finished, report.equal, report.kills) == (60, 60, 1)
    assert report.resumed >= 1
