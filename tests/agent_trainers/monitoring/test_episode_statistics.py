from dataclasses import replace

import pytest

from agent_envs.errors import RolloutError
from agent_trainers.monitoring.episode_statistics import (
    EvaluatedEnvironments,
    FaultWatch,
    count_faults,
    env_metrics,
    summarise,
    trainer_metrics,
)
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


def test_summaries_and_their_requests_are_no_drops():
    asked = {"context": {"is_summary_requested": True}}
    written = {
        "action": {"kind": "summary", "text": "so far"},
        "context": {"reason": "policy: the model's summary of 1 turns", "num_dropped": 2},
    }
    metrics = measure(episode(step(**asked), step(**written), step(), step()))
    assert metrics["context/summaries"] == 0.25
    assert metrics["context/drops"] == metrics["context/policy"] == 0.25
    assert "context/None" not in metrics


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


def failing(num_failed):
    """Return four episodes, the first of which failed."""
    error, ended = "Traceback: the database is down", [StopReason.ANSWERED] * (4 - num_failed)
    reasons = [StopReason.ENVIRONMENT_ERROR] * num_failed + ended
    return [summarise(trajectory(stop_reason=reason, error=error)) for reason in reasons]


def test_a_batch_of_failures_ends_the_run_with_the_first_error():
    with pytest.raises(RolloutError, match=r"(?s)4 of 4 .*environment_error 4.*database is down"):
        FaultWatch(0.5).check("train", failing(4))


def test_a_run_survives_two_bad_batches_and_ends_at_the_third_in_a_row():
    watch = FaultWatch(0.5)
    for num_failed in (3, 3, 2, 3, 3):
        watch.check("train", failing(num_failed))
    watch.check("eval", failing(3))  # counted by itself
    with pytest.raises(RolloutError, match="3 of 4"):
        watch.check("train", failing(3))


def test_without_a_limit_failures_are_only_counted():
    FaultWatch(None).check("train", failing(4))


def in_env(env, task, success, reward=0.0):
    named = {"env": env, "task_id": task, "group": f"{env}-{task}"}
    return summarise(episode(step(reward), **named, metrics={"success": success}))


def test_each_environment_has_its_own_figures_without_its_unscorable_episodes():
    broken = replace(in_env("b", "2", 0.0), is_scorable=False)
    episodes = [in_env("a", "1", 1.0, 2.0), in_env("a", "2", 0.0), in_env("b", "1", 1.0, 3.0)]
    metrics = env_metrics([*episodes, broken], ["a", "b", "c"])
    assert (metrics["env/a/success"], metrics["env/b/success"]) == (0.5, 1.0)
    assert (metrics["env/a/reward"], metrics["env/b/reward"]) == (1.0, 3.0)
    assert [metrics[f"env/{name}/share"] for name in "abc"] == [0.5, 0.5, 0]
    assert metrics["env/b/episodes/unscorable"] == 0.5
    assert "env/c/success" not in metrics


def test_an_evaluation_is_one_mean_over_all_of_its_batches():
    tally = EvaluatedEnvironments(["a", "b", "v"], {"v"}, 1)
    tally.add([in_env("a", str(i), 1.0) for i in range(4)], ())
    rest = [in_env("b", "0", 0.0), in_env("v", "0", 1.0), in_env("v", "1", 0.0)]
    again = in_env("a", "0", 0.0)  # fills the last batch up
    metrics = tally.add([*rest, again], ())
    assert metrics["success"] == 4 / 5  # not (1 + 0) / 2
    assert (metrics["env/a/success"], metrics["env/v/success"]) == (1.0, 0.5)
    tally.clear()
    assert tally.add([in_env("a", "0", 0.0), in_env("v", "0", 1.0)], ())["success"] == 0.0


def test_tasks_with_one_id_count_each_in_an_evaluation():
    tasks = [episode(step(), task=i, metrics={"success": float(i == 0)}) for i in (0, 1, 2, 3, 0)]
    evaluated = EvaluatedEnvironments([], (), 1)
    assert evaluated.add([summarise(each) for each in tasks], ())["success"] == 1 / 4
