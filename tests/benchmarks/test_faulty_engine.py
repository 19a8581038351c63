"""The server that fails on purpose, and our policy against it."""

import threading

import pytest

from agent_envs.errors import ServerError
from agent_trainers.trajectory import StopReason
from benchmarks.performance.faulty_engine import FAULTS, FaultyEngine, count_errors, run_sessions

pytest.importorskip("openai", reason="the extra openai is not installed")


@pytest.mark.parametrize("fault", FAULTS)
def test_no_session_is_lost_or_mixed_for_any_fault(fault):
    engine = FaultyEngine({fault: 0.2})
    with engine.serving() as url:
        episodes = run_sessions(url, 16, timeout_seconds=0.5)
    assert count_errors(episodes) == (0, 0)
    assert engine.counts[fault] > 0
    assert engine.counts[""] == sum(len(episode.transitions) for episode in episodes)


def test_sessions_continue_after_a_restart():
    engine = FaultyEngine({}, seconds=0.3)
    with engine.serving() as url:
        restart = threading.Timer(0.6, engine.restart, [0.5])
        restart.start()
        episodes = run_sessions(url, 16)
        restart.join()
    assert engine.counts["restart"] == 1
    assert count_errors(episodes) == (0, 0)


def test_a_server_that_always_fails_ends_its_episodes_unscored(monkeypatch):
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    with FaultyEngine({"503": 1.0}).serving() as url:
        episodes = run_sessions(url, 2)
    assert {episode.stop_reason for episode in episodes} == {StopReason.POLICY_ERROR}
    assert ServerError.__name__ in episodes[0].error


def test_a_turn_of_another_session_is_counted():
    with FaultyEngine({}).serving() as url:
        episodes = run_sessions(url, 2)
    first, second = (episode.transitions[0] for episode in episodes)
    first.completion_ids[:] = second.completion_ids
    assert count_errors(episodes) == (0, 1)
