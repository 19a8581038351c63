from dataclasses import replace

import pytest

from agent_trainers.monitoring.episode_statistics import count_faults, summarise, trainer_metrics
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory, transition


def step(reward=0.0, terms=None, **info):
    return transition([1], [2, 3], reward, reward_terms=terms or {}, info=info)


def episode(*steps, group="g", seconds=(), **changes):
    return trajectory(*steps, group_id=group, step_seconds=list(seconds), **changes)


def measure(*episodes):
    return trainer_metrics([summarise(trajectory) for trajectory in episodes])


def call(name="search", **action):
    return {"action": {"kind": "tool_call", "name": name, **action}}


INVALID = {"action": {"kind": "invalid", "error": "bad_json"}}
ANSWER = {"action": {"kind": "answer"}}


def test_tools_are_counted_with_their_failures_and_latencies():
    metrics = measure(
        episode(step(**call()), step(**call(error="tool_timeout")), step(**ANSWER),
                seconds=[0.1, 0.5, 9.0]),
        episode(step(**call("read")), step(**INVALID), seconds=[0.3, 9.0]),
    )  # fmt: skip
    # three calls in two episodes, one failed; seconds 0.1, 0.5, 0.3: other steps do not count
    tools = {name: value for name, value in metrics.items() if name.startswith("tools/")}
    assert tools == pytest.approx(tools | {
        "tools/calls": 1.5, "tools/calls/search": 1.0, "tools/calls/read": 0.5,
        "tools/failures": 1 / 3, "tools/tool_timeout": 1 / 3, "tools/seconds_mean": 0.3,
        "tools/seconds_p95": 0.48, "tools/seconds_max": 0.5,  # 0.3 + 0.9 * (0.5 - 0.3)
    })  # fmt: skip
    assert "tools/seconds_mean" not in measure(episode(step(**call())))
    none = measure(episode(step(**ANSWER)))
    assert (none["tools/calls"], "tools/failures" in none) == (0, False)


def test_each_call_of_a_turn_is_counted():
    calls = [call()["action"], call("read", error="tool_timeout")["action"], INVALID["action"]]
    turn = step(**call(error="tool_timeout", calls=calls))
    trajectory = episode(turn, step(**ANSWER), seconds=[0.4, 9.0])
    metrics = measure(trajectory)
    assert (metrics["tools/calls"], metrics["tools/calls/read"]) == (2.0, 1.0)
    assert (metrics["tools/failures"], metrics["tools/seconds_max"]) == (0.5, 0.4)
    assert count_faults([summarise(trajectory)])["faults/tool_timeout"] == 1


def test_a_failed_tool_is_no_invalid_action():
    metrics = measure(
        episode(step(**call(error="tool_error")), step(**INVALID), step(**INVALID), step(**ANSWER))
    )
    assert metrics["actions/bad_json"] == 0.5
    assert metrics["actions/tool_error"] == 0.25
    assert metrics["actions/invalid"] == 0.5


def test_reward_terms_are_logged_per_episode_and_per_step():
    metrics = measure(
        episode(step(1.5, {"correct": 1.0, "format": 0.5}), step(0.5, {"format": 0.5})),
        episode(step(0.0, {"correct": 0.0}), step(), step(), step()),
    )
    assert metrics["rewards/correct"] == 0.5
    assert metrics["rewards_per_step/correct"] == pytest.approx(1 / 6)
    assert metrics["rewards_per_step/format"] == pytest.approx(1 / 6)


def test_shortened_states_are_counted_by_context_policy():
    window = {"context": {"reason": "window: the last 1 turns", "num_dropped": 3}}
    budget = {"context": {"reason": "budget: 90 tokens", "num_dropped": 1}}
    # what the last step's context would have dropped was never shown to anyone
    metrics = measure(episode(step(), step(**window), step(**budget), step(**window)))
    assert metrics["context/drops"] == 0.5
    assert metrics["context/window"] == 0.25
    assert metrics["context/budget"] == 0.25
    assert metrics["context/dropped_messages"] == 1.0


def test_groups_with_equal_returns_have_no_variance_and_failures_count_only_as_failed():
    failed = replace(episode(step(9.0), group="a"), stop_reason=StopReason.ENVIRONMENT_ERROR)
    metrics = measure(
        failed,
        episode(step(1.0), group="a"), episode(step(0.5), step(0.5), group="a"),
        episode(step(1.0), group="b"), episode(step(0.0), group="b"),
        episode(step(1.0), group="alone"),
    )  # fmt: skip
    assert metrics["groups/without_variance"] == 0.5
    assert metrics["reward"] == 4 / 5
    assert metrics["episodes/unscorable"] == pytest.approx(1 / 6)
    assert (metrics["episodes/mean_turns"], metrics["episodes/max_turns"]) == (6 / 5, 2.0)
    assert "reward" not in measure(failed)
